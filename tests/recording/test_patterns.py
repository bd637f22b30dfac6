"""Secrets of well-known shapes go; what only looks a little like one stays."""

from __future__ import annotations

import base64
import hashlib
import time

import pytest

from marft_agents.recording.patterns import mask, name_kind

RANDOM = "aB3dE5gH7jK9mN1pQ2sT4vW6xY8zA0cD5fG7"
UUID = "550e8400-e29b-41d4-a716-446655440000"
JWT = f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{RANDOM}"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{RANDOM}\n{RANDOM}==\n-----END RSA PRIVATE KEY-----"
SECRETS = [
    (f"sk-{RANDOM}", "openai-key"),
    (f"sk-proj-{RANDOM}-x_y", "openai-key"),
    ("sk-test-1", "openai-key"),
    (f"sk-ant-api03-{RANDOM}", "anthropic-key"),
    ("AKIAIOSFODNN7EXAMPLE", "aws-key"),
    (f"ghp_{RANDOM}", "github-token"),
    (f"github_pat_{RANDOM}", "github-token"),
    (f"glpat-{RANDOM}", "gitlab-token"),
    (f"xoxb-123456789012-{RANDOM}", "slack-token"),
    (f"AIza{RANDOM[:35]}", "google-key"),
    (f"ya29.{RANDOM}", "google-key"),
    (f"hf_{RANDOM}", "huggingface-token"),
    (f"sk_live_{RANDOM}", "stripe-key"),
    (f"npm_{RANDOM}", "npm-token"),
    (f"gsk_{RANDOM}", "api-key"),
    (JWT, "jwt"),
    (PEM, "private-key"),
]
AROUND = [
    "{}",
    "use {} please",
    '{{"content": "line\\n{}"}}',
    "https://example.invalid/?q={}&x=1",
    "(`{}`)",
    "鍵{}。",
]


@pytest.mark.parametrize(("secret", "label"), SECRETS, ids=[s[:12] for s, _ in SECRETS])
def test_well_known_shapes_are_masked_wherever_they_stand(secret: str, label: str) -> None:
    for around in AROUND:
        text, labels = mask(around.format(secret))
        assert text == around.format(f"[redacted:{label}]")
        assert labels == [label]


@pytest.mark.parametrize(
    ("text", "secret", "label"),
    [
        ("Authorization: Bearer abc123def456ghi", "abc123def456ghi", "authorization"),
        ("{'Authorization': 'Bearer abc123def456ghi'}", "abc123def456ghi", "authorization"),
        ("-H 'authorization: Basic dXNlcjpodW50ZXIy'", "dXNlcjpodW50ZXIy", "authorization"),
        ("postgres://bob:hunter2@db:5432/shop", "hunter2", "password"),
        ("redis://:p@ss1word@cache/0", "p@ss1word", "password"),
        (f"git clone https://{RANDOM}@example.invalid/x", RANDOM, "token"),
        ('{"user": "bob", "password": "hunter2"}', "hunter2", "password"),
        (r'{"args": "{\"password\": \"hunter2\"}"}', "hunter2", "password"),
        ("OpenAI(api_key='abc1234')", "abc1234", "api-key"),
        ("export MY_API_KEY=abc1234def", "abc1234def", "api-key"),
        ("API key: abc1234def", "abc1234def", "api-key"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI/K7MDENG", "api-key"),
        ("my password is hunter22.", "hunter22", "password"),
        ("?access_token=abc123&x=1", "abc123", "token"),
        ("token=0123456789abcdef0123", "0123456789abcdef0123", "token"),
        ("client_secret: 8f14e45fceea167a", "8f14e45fceea167a", "secret"),
        ("İ PASSWORD=hunter22", "hunter22", "password"),
    ],
)
def test_values_beside_a_telling_name_are_masked(text: str, secret: str, label: str) -> None:
    assert mask(text) == (text.replace(secret, f"[redacted:{label}]"), [label])


@pytest.mark.parametrize(
    "text",
    [
        "a task-based plan with sk-learn, sk-container-id-1 and sk-estimator-doc-link-fitted",
        "Basic authentication is needed; Basic c2hvcnQ= is not a pair",
        "bearer of bad news",
        "password: str = Field(min_length=8)",
        '"password": {"type": "string"}, "password": "required"',
        "password must be at least 8 characters",
        "password = get_password1(user)",
        "password = config.password1",
        "access_key, secret_key = s3_server['connection']",
        "access_key, secret_key = s3_connection",
        '"encryptionKey": "arn:aws:kms:eu-west-2:123456789012:key/1"',
        "token = tokens[i]; max_tokens=512; token: Token = next_token_1",
        "api_key=os.environ['OPENAI_API_KEY1']",
        "api_key = settings.openai_key1",
        'api_key: "${OPENAI_API_KEY1}", api_key="<your key 1>", api_key="your-api-key-1"',
        '"eos_token": "<|reserved_special_token_12|>"',
        '{"token": "cat", "secret": "the fox ate 2 grapes"}',
        "the secret is 42 and the token is cat",
        f"sha256:{hashlib.sha256(b'').hexdigest()} {UUID}",
        f"commit {hashlib.sha1(b'').hexdigest()}; key: {UUID}; primary_key={UUID}",
        "postgres://user:password@localhost/db and http://localhost:8000/v1?a=b:c@d",
        "hf_model_name_or_path_of_the_thing",
        "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 40).decode(),
        "password_hash = 'abc123'; secret_word = 'platypus'; password_file=/run/secrets/x1",
        "[redacted:openai-key] and api_key='[redacted:api-key]'",
    ],
)
def test_prose_code_and_hashes_stay(text: str) -> None:
    assert mask(text) == (text, [])


def test_masking_twice_is_masking_once() -> None:
    text = " ".join(secret for secret, _ in SECRETS)
    once, _ = mask(text)
    assert mask(once) == (once, [])


def test_several_secrets_in_one_text_are_all_found() -> None:
    text, labels = mask(f"a sk-{RANDOM} b api_key='{JWT}' c postgres://u:hunter2@h")
    assert text == (
        "a [redacted:openai-key] b api_key='[redacted:jwt]' c postgres://u:[redacted:password]@h"
    )
    assert labels == ["openai-key", "jwt", "password"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("api_key", ("api-key", True)),
        ("apiKey", ("api-key", True)),
        ("X-Api-Key", ("api-key", True)),
        ("OPENAI_API_KEY", ("api-key", True)),
        ("Authorization", ("authorization", True)),
        ("db_password", ("password", True)),
        ("refreshToken", ("token", True)),
        ("token", ("token", False)),
        ("max_tokens", ("token", False)),
        ("key", None),
        ("author", None),
        ("password_hint", None),
    ],
)
def test_names_tell(name: str, kind: tuple[str, bool] | None) -> None:
    assert name_kind(name) == kind


ADVERSARIAL = [
    "sk-", "sk-a1", "eyJ", "eyJaaaaaaaa.eyJ-", "token=", "password='", "key: ", "://", "://a:",
    "-----BEGIN PRIVATE KEY-----", "Bearer ", "Bearer a", "Basic aaaaaa", "xoxb-",
    "secretkeytoken:",    "api_key \\\\\\\"", "a", "key                is ",
]  # fmt: skip


@pytest.mark.parametrize("piece", ADVERSARIAL)
def test_time_is_linear_in_the_text(piece: str) -> None:
    """Four times the text takes about four times as long, whatever it holds."""

    def seconds(length: int) -> float:
        text = (piece * (length // len(piece) + 1))[:length]
        times: list[float] = []
        for _ in range(3):
            started = time.thread_time()
            mask(text)
            times.append(time.thread_time() - started)
        return min(times)

    short, long = seconds(5_000), seconds(20_000)
    assert long < 12 * short + 0.005
