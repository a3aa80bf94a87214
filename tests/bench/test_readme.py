"""The README's figures are what the command makes of bench/results, and say what was measured and nothing else."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tokenmill.bench.readme import BEGIN, END, figures, newest_results, update_readme, with_figures
from tokenmill.cli.main import main
from tokenmill.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_says_what_the_command_makes():
    text = (ROOT / "README.md").read_text()
    assert with_figures(text, figures(ROOT / "bench" / "results", "bench/results")) == text


def engine_result(model="m", started="2026-01-02T03:04:05+0000", **changes):
    row = {"case": "decode, 1 stream", "panel": "decode", "limit": 200.0, "tokenmill": 166.3, "llama-cpp": 86.25,
           "ratio to llama-cpp": 1.928, "share": 0.8315}  # fmt: skip
    mixed = {"case": "mixed", "panel": "mixed", "limit": None, "tokenmill": 1234.5, "llama-cpp": None,
             "ratio to llama-cpp": None, "share": None, "loss tokenmill": 0.052, "loss llama-cpp": None}  # fmt: skip
    ceilings = {"read_bytes": 20e9, "float_ops": 300e9, "int8_ops": 1200e9, "isa": "avx512", "recipe": "vpdpbusd"}
    return {
        "kind": "engine",
        "complete": True,
        "machine": {"cpu": "A CPU", "cores": 2, "started": started},
        "model": model,
        "format": "Q4_1",
        "peers": {"llama-cpp": {"version": "0.3.36", "format": "Q4_1", "repack": False}},
        "medians": [row, mixed],
        "ceilings": [{"case": "decode, 1 stream", "round": 0, **ceilings}],
        "rounds": [{"case": "decode, 1 stream", "runner": "tokenmill", "round": n} for n in range(3)],
        **changes,
    }


def save(folder, name, result):
    (folder / name).write_text(json.dumps(result))


def test_the_table_and_its_caption(tmp_path):
    save(tmp_path, "engine-1.json", engine_result())
    made = figures(tmp_path, "results").splitlines()
    assert made == [
        "m on 2 cores of A CPU (avx512): 20.0 GB/s read, 300 Gop/s float32, 1,200 Gop/s int8 (vpdpbusd). Medians of 3 "
        "interleaved rounds, 2026-01-02; llama-cpp is llama-cpp-python 0.3.36 on Q4_1, without repacking (its repacked "
        "kernels die on this machine).",
        "",
        "| tokens/s | limit | tokenmill | llama-cpp | ratio | share of limit |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| decode, 1 stream | 200 | 166 | 86.2 | 1.9 | 83% |",
        "| mixed; loss: tokenmill 5%, llama-cpp - | - | 1,234 | - | - | - |",
    ]


def test_the_newest_complete_result_of_each_model_counts(tmp_path):
    save(tmp_path, "engine-1.json", engine_result("a", "2026-01-03"))
    save(tmp_path, "engine-2.json", engine_result("a", "2026-01-02"))
    save(tmp_path, "engine-3.json", engine_result("b", "2026-01-01"))
    save(tmp_path, "engine-4.json", engine_result("a", "2026-01-09", complete=False))
    save(tmp_path, "engine-5.json", {**engine_result("c", "2026-01-09"), "ceilings": []})  # nothing to hold it against
    found = newest_results(tmp_path, "engine")
    assert [(r["model"], r["machine"]["started"]) for r in found] == [("b", "2026-01-01"), ("a", "2026-01-03")]


def test_a_case_that_was_measured_again_replaces_its_row_and_no_other(tmp_path):
    again = engine_result(started="2026-01-03T00:00:00+0000")
    again["medians"] = [{**again["medians"][1], "tokenmill": 2000.0}, {**again["medians"][0], "case": "prefill"}]
    again["rounds"] = [{"case": "mixed", "runner": "tokenmill", "round": 0}]
    save(tmp_path, "engine-1.json", engine_result())
    save(tmp_path, "engine-2.json", again)
    (result,) = newest_results(tmp_path, "engine")
    rows = [(row["case"], row["tokenmill"]) for row in result["medians"]]
    assert rows == [("decode, 1 stream", 166.3), ("mixed", 2000.0), ("prefill", 166.3)]
    assert "Medians of 1 to 3 interleaved rounds" in figures(tmp_path, "results")
    other = engine_result(started="2026-01-04T00:00:00+0000", machine={"cpu": "B", "cores": 2, "started": "2026-01-04"})
    save(tmp_path, "engine-3.json", other)
    assert len(newest_results(tmp_path, "engine")) == 2  # machines are not mixed


def test_models_with_a_case_or_two_share_a_table(tmp_path):
    for number, model in enumerate("abc"):
        result = engine_result(model, f"2026-01-0{number + 1}")
        result["medians"] *= 2 if model == "b" else 1  # four cases: a table of its own
        save(tmp_path, f"engine-{number}.json", result)
    first, *_, caption, table = figures(tmp_path, "results").split("\n\n")
    assert first.startswith("b on 2 cores")
    assert caption.startswith("Other models and formats, on 2 cores") and "0.3.36 on the same file" in caption
    assert [line.split(" |")[0] for line in table.splitlines()[2:]] == [
        "| a: decode, 1 stream",
        "| a: mixed; loss: tokenmill 5%, llama-cpp -",
        "| c: decode, 1 stream",
        "| c: mixed; loss: tokenmill 5%, llama-cpp -",
    ]


def test_served_figures_stand_below(tmp_path):
    save(tmp_path, "engine-1.json", engine_result())
    ours = {"workload": "chat", "target": "tokenmill", "output_tokens_per_s": 250.4, "ttft_p50_ms": 80.0, "errors": 0}
    theirs = {**ours, "target": "llama-server", "output_tokens_per_s": 79.0, "ttft_p50_ms": 3600.0}
    peer = {"model": "m.gguf", "version": "9", "flags": "-t 2"}
    ratios = {"output_tokens_per_s": 3.17, "ttft_p50_ms": 45.0, "itl_p50_ms": None}
    served = {
        **engine_result(),
        "kind": "serving",
        "servers": {"tokenmill": {"model": "m.gguf"}, "llama-server": peer},
        "medians": [ours, theirs],
        "ratios": [{"workload": "chat", "against": "llama-server", **ratios}],
        "peak_memory_bytes": {"tokenmill": 300 << 20, "llama-server": None},
    }
    del served["model"]
    save(tmp_path, "serving-1.json", served)
    *_, caption, _, _, _, first, second = figures(tmp_path, "results").splitlines()
    assert caption == (
        "m.gguf served on 2 cores of A CPU (avx512): 20.0 GB/s read, 300 Gop/s float32, 1,200 Gop/s int8 (vpdpbusd). "
        "Medians of 3 interleaved rounds, 2026-01-02; llama-server is version 9 with -t 2; times in ms, in brackets "
        "how many times better tokenmill is. Resident at most: tokenmill 300 MiB."
    )
    assert first == "| chat | tokenmill | 250 | 80 | - | - | - | 0 |"
    assert second == "| chat | llama-server | 79 (3.2x) | 3,600 (45.0x) | - | - | - | 0 |"


def test_the_command_writes_between_the_markers_once(tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    save(results, "engine-1.json", engine_result())
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for says in ("written anew", "already says so"):
        done = CliRunner().invoke(main, ["bench", "report", str(results), "--readme", str(readme)])
        assert done.exit_code == 0 and says in done.output
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\nm on 2 cores") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "](results/figures.png)" in text and (results / "figures.png").exists()


def test_what_is_missing_is_said(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("no markers")
    assert figures(tmp_path, "results") == "No figures yet: `make bench` measures them."
    save(tmp_path, "engine-1.json", engine_result())
    with pytest.raises(ConfigError, match=r"README\.md: the file must have the lines"):
        update_readme(readme, tmp_path)
    readme.write_text(f"{BEGIN}\n{END}\n")
    (tmp_path / "engine-2.json").write_text("{")
    with pytest.raises(ConfigError, match=r"engine-2.json is not JSON"):
        update_readme(readme, tmp_path)


def test_without_a_usable_result_the_readme_keeps_its_figures(tmp_path):
    results, readme = tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    readme.write_text(f"{BEGIN}\nmeasured with care\n{END}\n")
    before = readme.read_text()

    def report():
        return CliRunner().invoke(main, ["bench", "report", str(results), "--readme", str(readme)])

    assert (done := report()).exit_code == 1 and f"no results in {results}" in done.stderr
    old = engine_result()
    del old["complete"]
    save(results, "engine-1.json", old)
    save(results, "engine-2.json", engine_result(complete=False))
    save(results, "engine-3.json", {"kind": "throughput"})
    save(results, "engine-4.json", engine_result(ceilings=[]))
    save(results, "engine-5.json", [])
    save(results, "serving-1.json", {"kind": "serving"})
    done = report()
    for name, why in (
        ("engine-1", "older format"),
        ("engine-2", "cut short"),
        ("engine-3", "no engine result"),
        ("engine-4", "no ceilings"),
        ("engine-5", "no engine result"),
        ("serving-1", "no machine"),
    ):
        assert any(f"{name}.json" in line and why in line for line in done.stderr.splitlines()), done.stderr
    assert done.exit_code == 1 and readme.read_text() == before and not (results / "figures.png").exists()
    save(results, "engine-6.json", engine_result(started="2026-01-01"))
    save(results, "engine-7.json", engine_result(started="2026-01-02"))
    done = report()
    assert done.exit_code == 0 and f"left out: {results / 'engine-6.json'}: a newer one is there" in done.stderr
    assert "m on 2 cores" in readme.read_text()
