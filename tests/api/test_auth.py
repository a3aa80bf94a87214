"""With a key set, every route but /health wants it, however the path is spelled (BC-071)."""

import pytest

from tests.api.conftest import QUICK
from tests.api.server import error_of, read_until, serving, strict_json
from tokenmill.server.app import ROUTES

KEY, SECOND = "sk-Correct-Horse", "sk-second"


@pytest.fixture(scope="module")
def guarded(rigged_path):
    env = {"TOKENMILL_API_KEY": f"{KEY},{SECOND}"}
    with serving(rigged_path, *QUICK, env=env, key=KEY) as server:
        yield server
        assert KEY not in server.log and SECOND not in server.log


def get(server, method, path, headers):
    """Without a client's own idea of what a path may look like."""
    sock = server.connect()
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    sock.sendall(method + b" " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n" + lines + b"\r\n")
    raw = read_until(sock, b"\r\n\r\n")
    sock.close()
    return int(raw.split(b" ")[1])


BAD_KEYS = {
    "none": [],
    "wrong": [(b"authorization", b"Bearer sk-wrong")],
    "other case": [(b"authorization", b"Bearer " + KEY.upper().encode())],
    "a beginning": [(b"authorization", b"Bearer " + KEY[:-1].encode())],
    "more": [(b"authorization", b"Bearer " + KEY.encode() + b"x")],
    "empty": [(b"authorization", b"Bearer ")],
    "no scheme": [(b"authorization", KEY.encode())],
    "other scheme": [(b"authorization", b"Basic " + KEY.encode())],
    "both keys": [(b"authorization", f"Bearer {KEY},{SECOND}".encode())],
    "two headers": [(b"authorization", b"Bearer " + KEY.encode()), (b"authorization", b"Bearer " + KEY.encode())],
    "other header": [(b"x-api-key", KEY.encode())],
    "not ASCII": [(b"authorization", b"Bearer \xff\xfe")],
}


@pytest.mark.parametrize("headers", BAD_KEYS.values(), ids=BAD_KEYS)
def test_every_route_but_health_is_closed(guarded, headers):
    for route in ROUTES:
        path = route.path.replace("{name:path}", "rigged").encode()
        for method in {*route.methods, "OPTIONS", "HEAD", "DELETE"}:
            expected = {200, 405} if path == b"/health" else {401}
            assert get(guarded, method.encode(), path, headers) in expected, (method, path)


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/V1/models", "/v1;x/models", "/%2fv1/models", "/v1/models/", "/health/../v1/models", "/nope",
     "/health/", "/healthx", "/health/v1/models", "/Health", "/%2fhealth", "/health%2f..%2fv1/models", "/?/health",
     "/./health", "/metrics", "/docs", "/openapi.json"],
)  # fmt: skip
def test_odd_paths_do_not_slip_round_it(guarded, path):
    assert get(guarded, b"GET", path.encode(), []) == 401


@pytest.mark.parametrize("path", ["/health", "/health?x=1"])
def test_health_is_open(guarded, path):
    assert get(guarded, b"GET", path.encode(), []) == 200


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER {KEY}", f"Bearer {SECOND}"])
def test_the_keys_open_it(guarded, value):
    assert get(guarded, b"GET", b"/v1/models", [(b"authorization", value.encode())]) == 200


def test_a_huge_key_is_a_huge_header(guarded):
    assert get(guarded, b"GET", b"/v1/models", [(b"authorization", b"Bearer " + b"k" * 1_000_000)]) == 431


def test_the_sdk_raises_its_own_and_works_with_the_key(guarded):
    import openai

    wrong = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as refused:
        wrong.models.list()
    assert refused.value.code == "invalid_api_key"
    assert "sk-wrong" not in str(refused.value)
    assert guarded.chat(max_tokens=2)["choices"][0]["message"]["content"] == "ab"


def test_the_answer_has_the_apis_shape_and_says_how(guarded):
    import httpx

    answer = httpx.post(f"{guarded.url}/v1/chat/completions", json={})
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert error_of(answer)["code"] == "invalid_api_key"


def test_keys_are_in_no_metric_and_no_line(guarded):
    text = guarded.http.get("/metrics").text
    assert KEY not in text and SECOND not in text
    assert "$TOKENMILL_API_KEY" in guarded.log  # the curl line names it
    assert strict_json(guarded.http.get("/v1/models").content)["data"]
