"""Task files and how they are drawn from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marft_agents.errors import ConfigError
from marft_agents.training.tasks import Task, TaskMixer, read_tasks


def _file(folder: Path, *lines: str) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_line_is_the_task_or_says_more_about_it(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        '\ufeff"Add 2 and 3."',
        "",
        '{"question": "2+3?", "answer": 5}',
        '{"task": {"q": 1}, "id": "easy", "weight": 0.5, "metadata": {"split": "train"}}\r',
        '{"task": 0, "id": 7}',
    )
    assert read_tasks(path) == [
        Task("line-1", "Add 2 and 3."),
        Task("line-3", {"question": "2+3?", "answer": 5}),
        Task("easy", {"q": 1}, 0.5, {"split": "train"}),
        Task("7", 0),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'task': 1}", "not JSON .*one task a line"),
        ('{"task": NaN}', "not JSON .NaN is no JSON value"),
        ("[" * 100_000, "not JSON"),
        ("3", "3 is no task"),
        ("null", "null is no task"),
        ('""', '"" is no task'),
        ("{}", "{} is no task"),
        ('["a", "b"]', "is no task"),
        ('{"task": null}', "'task' is empty"),
        ('{"task": " "}', "'task' is empty"),
        ('{"task": "a", "wieght": 2}', "'wieght' beside 'task'; did you mean 'weight'"),
        ('{"task": "a", "answer": 5}', "'answer' beside 'task' .*under 'task'.*under 'metadata'"),
        ('{"task": "a", "id": ""}', "'id' is \"\"; it must be a text or a whole number"),
        ('{"task": "a", "id": true}', "'id' is true"),
        ('{"task": "a", "weight": 0}', "'weight' is 0; it must be a number above 0"),
        ('{"task": "a", "weight": -1}', "'weight' is -1"),
        ('{"task": "a", "weight": true}', "'weight' is true"),
        ('{"task": "a", "weight": "2"}', "'weight' is \"2\""),
        ('{"task": "a", "weight": 1e999}', "'weight' is Infinity"),
        ('{"task": "a", "weight": 1' + "0" * 400 + "}", "'weight' is 10"),
        ('{"task": "a", "metadata": [1]}', r"'metadata' is \[1\]; it must be an object"),
    ],
)
def test_every_mistake_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = _file(tmp_path, '"good"', line)
    with pytest.raises(ConfigError, match=message) as caught:
        read_tasks(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_bytes_that_are_no_text_are_a_mistake_of_their_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'"good"\n"\xff"\n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:2: not JSON"):
        read_tasks(path)


def test_an_id_comes_once(tmp_path: Path) -> None:
    path = _file(tmp_path, '{"task": "a", "id": "line-3"}', '"b"', '"c"')
    with pytest.raises(ConfigError, match=r":3: the id 'line-3' is also that of line 1"):
        read_tasks(path)


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no task"):
        read_tasks(_file(tmp_path, "", "  "))
    with pytest.raises(ConfigError, match=r"cannot read the tasks .*: No such file"):
        read_tasks(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="no tasks"):
        TaskMixer([], 0)


def _tasks(*weights: float) -> list[Task]:
    return [Task(f"t{i}", i, weight) for i, weight in enumerate(weights)]


def _ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8),
    st.integers(0, 30),
    st.integers(0, 5),
    st.integers(0, 3),
)
def test_nothing_is_put_back_before_all_were_drawn(
    weights: list[float], count: int, iteration: int, round: int
) -> None:
    drawn = _ids(TaskMixer(_tasks(*weights), 3).draw(iteration, round, count))
    assert len(drawn) == count
    for start in range(0, count, len(weights)):
        part = drawn[start : start + len(weights)]
        assert len(set(part)) == len(part)


def test_a_draw_has_no_memory() -> None:
    tasks = _tasks(*range(1, 21))
    one, other = TaskMixer(tasks, 5), TaskMixer(tasks, 5)
    draws = [_ids(one.draw(i, r, 6)) for i in range(3) for r in range(2)]
    assert _ids(other.draw(2, 1, 6)) == draws[-1]
    assert len({tuple(draw) for draw in draws}) == 6
    assert _ids(TaskMixer(tasks, 6).draw(0, 0, 6)) != draws[0]
    assert _ids(other.draw(2, 1, 3)) == draws[-1][:3]


def test_a_heavier_task_comes_more_often() -> None:
    mixer = TaskMixer(_tasks(1, 1, 2), 0)
    first = Counter(mixer.draw(i, 0, 1)[0].id for i in range(4000))
    assert first["t2"] / 4000 == pytest.approx(0.5, abs=0.03)
    assert first["t0"] / 4000 == pytest.approx(0.25, abs=0.03)
    second = Counter(mixer.draw(i, 0, 2)[1].id for i in range(4000))
    # P(t2 second) = 2 * 1/4 * 2/3
    assert second["t2"] / 4000 == pytest.approx(1 / 3, abs=0.03)


def test_tasks_named_last_come_after_all_others() -> None:
    mixer = TaskMixer(_tasks(1, 1, 1, 1), 0)
    drawn = _ids(mixer.draw(0, 1, 4, last={"t0", "t1"}))
    assert set(drawn[:2]) == {"t2", "t3"} and set(drawn[2:]) == {"t0", "t1"}
    assert _ids(mixer.draw(0, 1, 2, last={"t0", "t1", "t2", "t3"})) == _ids(mixer.draw(0, 1, 2))


def test_the_fingerprint_is_of_what_decides_a_draw() -> None:
    tasks = _tasks(1, 2)
    marks = {
        TaskMixer(tasks, 0).fingerprint,
        TaskMixer(tasks, 1).fingerprint,
        TaskMixer(tasks[:1], 0).fingerprint,
        TaskMixer([tasks[0], Task("t1", 1, 3)], 0).fingerprint,
        TaskMixer([tasks[0], Task("t1", {"q": 1}, 2)], 0).fingerprint,
    }
    assert len(marks) == 5
    assert TaskMixer(list(tasks), 0).fingerprint in marks
