"""The live server: this machine only, two paths, and nothing is read again that did not change."""

import http.client
import json
import os
import threading

import pytest

from hotrow.errors import DataError, SettingsError
from hotrow.report.live import LivePages, LiveServer
from run_folders import run_folder


@pytest.fixture
def served(data, tmp_path):
    path = run_folder(tmp_path / "run", data)
    with LiveServer(LivePages([path])) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()

        def get(what, host=None):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            connection.request("GET", what, headers={"Host": host} if host else {})
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, body

        yield path, get
        server.shutdown()
        thread.join()


def test_the_page_and_its_data_are_served(served):
    pytest.importorskip("plotly")
    _, get = served
    status, body = get("/")
    assert status == 200 and b'id="pause"' in body and b"Plotly" in body
    status, body = get("/data.json")
    news = json.loads(body)
    assert status == 200 and news["plots"] and "table-plot-loss" in news["parts"] and "step 40" in news["now"]
    assert get("/metrics.jsonl")[0] == 404


def test_what_is_known_is_not_sent_again_and_what_is_new_is(served):
    path, get = served
    version = json.loads(get("/data.json")[1])["version"]
    assert get(f"/data.json?version={version}") == (204, b"")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 44, "loss": 0.01, "samples": 1408, "seconds": 1.4}) + "\n")
    os.utime(path / "metrics.jsonl", ns=(1, 1))
    status, body = get(f"/data.json?version={version}")
    assert status == 200 and "step 44" in json.loads(body)["now"]


def test_another_host_name_is_refused(served):
    _, get = served
    assert get("/data.json", host="evil.example")[0] == 403


def test_a_port_that_is_taken_is_named(data, tmp_path):
    pages = LivePages([run_folder(tmp_path / "run", data)])
    with LiveServer(pages) as server, pytest.raises(SettingsError, match=f"Port {server.server_port}"):
        LiveServer(pages, server.server_port)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a run folder"):
        LivePages([tmp_path])()
