"""Which earlier turns a prompt contained."""

from __future__ import annotations

from typing import Any

from marft_agents.recording.linking import Ledger, message_text


def _user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def _ledger(*said: tuple[str, str, str]) -> Ledger:
    ledger = Ledger()
    for turn_id, agent, text in said:
        ledger.add(turn_id, agent, text)
    return ledger


def test_equal_text_links_whatever_its_length_or_form() -> None:
    ledger = _ledger(("t1", "planner", "ok\n"), ("t2", "coder", "done"))
    assert ledger.link([_user("Task"), _user("ok")]) == ["t1"]
    assert ledger.link([_user([{"type": "text", "text": "done"}])]) == ["t2"]


def test_the_newest_of_equal_texts_is_linked_and_the_name_breaks_ties() -> None:
    ledger = _ledger(("t1", "planner", "ok"), ("t2", "coder", "ok"))
    assert ledger.link([_user("ok")]) == ["t2"]
    assert ledger.link([_user("ok", name="planner")]) == ["t1"]
    assert ledger.link([_user("ok", name="someone")]) == ["t2"]


def test_each_output_explains_one_message() -> None:
    ledger = _ledger(("t1", "planner", "ok"), ("t2", "planner", "ok"))
    assert ledger.link([_user("ok"), _user("so?"), _user("ok")]) == ["t1", "t2"]


def test_text_inside_text_links_when_it_is_long_enough() -> None:
    ledger = _ledger(("t1", "planner", "Ship it on Friday."), ("t2", "coder", "yes"))
    assert ledger.link([_user("planner said: Ship it on Friday.\ncoder said: yes")]) == ["t1"]


def test_a_truncated_message_links() -> None:
    text = "The whole plan is to ship on Friday and then to rest until Monday."
    assert _ledger(("t1", "planner", text)).link([_user(text[:40])]) == ["t1"]


def test_system_text_and_selections_prove_nothing_by_substring() -> None:
    ledger = _ledger(("t1", "planner", "a long answer"))
    ledger.add("t2", "manager", "coder_agent", quotable=False)
    assert ledger.link([{"role": "system", "content": "Read: a long answer"}]) == []
    assert ledger.link([_user("the coder_agent writes code")]) == []


def test_a_text_that_was_sent_before_the_output_existed_does_not_contain_it() -> None:
    ledger = Ledger()
    task = _user("What is two plus two? Say: the answer is four.")
    assert ledger.link([task]) == []
    ledger.add("t1", "planner", "the answer is four")
    assert ledger.link([task]) == []
    assert ledger.link([task, _user("the answer is four")]) == ["t1"]


def test_an_output_that_quotes_the_task_is_not_in_the_task() -> None:
    ledger = Ledger()
    task = "Please compute the sum of the first ten odd numbers."
    ledger.link([_user(task)])
    ledger.add("t1", "planner", f"{task} It is 100.")
    assert ledger.link([_user(task)]) == []


def test_call_ids_link_calls_and_their_results() -> None:
    ledger = Ledger()
    ledger.add("t1", "planner", None, call_ids=["c1"])
    ledger.add("t2", "planner", None, call_ids=["c2"])
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}
    assert ledger.link([call]) == ["t1"]
    assert ledger.link([{"role": "tool", "tool_call_id": "c2", "content": "42"}]) == ["t2"]


def test_a_frameworks_rendering_of_a_turn_links_as_well() -> None:
    ledger = Ledger()
    ledger.add("t1", "planner", None, call_ids=["c1"])
    ledger.add("t1", "planner", "Transferred to coder.")
    assert ledger.link([_user("Transferred to coder.")]) == ["t1"]


def test_delivered_messages_count_only_when_they_were_sent() -> None:
    ledger = _ledger(("t1", "planner", "ok"), ("t2", "coder", "ok"))
    delivered = [("ok", "t1"), ("gone", "t2")]
    assert ledger.link([_user("ok", name="coder")], delivered) == ["t1", "t2"]
    assert ledger.link([_user("something")], delivered) == []


def test_message_text_reads_any_content() -> None:
    assert message_text({"content": None}) == message_text({}) == ""
    assert message_text({"content": [{"type": "text", "text": "a"}, {"x": 1}, "b"]}) == "a"
    assert message_text({"content": {"k": 1}}) == '{"k": 1}'
