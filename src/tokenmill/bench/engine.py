"""The engine benchmark: token ids in, token ids out, no server, no text; alone or beside a peer in the same run.

Every case in every round on every engine, A B B A. Prompts are random ids, fresh in each round, the same for all, and
no prefix cache helps. The machine's ceilings are measured before and after each case of each round, because machines
drift; the median rate over the median of what those ceilings allow (limits.py) is the share. The result is handed out
after each case, so that a run that is cut short loses nothing, and run_engine_bench() goes on from such a result.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import KV_CACHE_BYTES, EngineConfig
from ..errors import ConfigError
from .cases import Case, Timing, mixed_loss
from .machine import Ceilings, describe, measure_ceilings, middle
from .runners import LlamaCppRunner, Runner, RunnerDied, TokenmillRunner

Limit = Callable[[Case, Ceilings], float | None]
Save = Callable[[dict], None]
MAX_DEATHS = 2  # of a peer in one case, before it is left out of that case


def run_cases(
    runners: Sequence[Runner],
    cases: Sequence[Case],
    *,
    vocab_size: int,
    ceilings: Callable[[], Ceilings],
    limit: Limit,
    repeat: int = 3,
    seed: int = 1,
    earlier: dict | None = None,
    progress: Callable[[str], None] = lambda text: None,
    save: Save = lambda result: None,
) -> dict:
    """{"rounds": each run, "ceilings": each case and round, "medians": one row a case, "complete": whether all ran}.

    A row of medians: tokens/s of each runner, the first's over each other's, the limit, the first's share of it, and
    for mixed cases each one's loss. `earlier` is the result of a run that was cut short: its whole rounds are kept.
    """
    rounds, measured = _whole_rounds(earlier, [runner.name for runner in runners])
    done = {(row["case"], row["round"]) for row in measured}
    deaths: Counter[tuple[str, str]] = Counter()

    def result(complete: bool) -> dict:
        medians = [_median_row(case, runners, rounds, measured, limit) for case in cases]
        return {"complete": complete, "medians": medians, "ceilings": measured, "rounds": rounds}

    for runner in runners:  # pages touched, threads woken, caches warm
        progress(f"warming up {runner.name}")
        runner.generate([[7] * 16, [9] * 16], 8)
    before: Ceilings | None = None
    for number in range(repeat):
        for index, case in enumerate(cases):
            if (case.name, number) in done:
                continue
            before = before or ceilings()
            words = random.Random(f"{seed} {number} {case.name}")
            *prompts, late = (
                [words.randrange(vocab_size) for _ in range(length)]
                for length in (*[case.prompt_tokens] * case.streams, case.late_tokens)
            )
            for runner in runners if number % 2 == 0 else runners[::-1]:
                if deaths[case.name, runner.name] >= MAX_DEATHS:
                    continue
                progress(
                    f"round {number + 1} of {repeat}, case {index + 1} of {len(cases)}: {case.name}, {runner.name}"
                )
                row = {"case": case.name, "runner": runner.name, "round": number}
                try:
                    row |= _run(runner, case, prompts, late)
                except RunnerDied as error:
                    deaths[case.name, runner.name] += 1
                    row["error"] = str(error)
                if "error" in row:
                    progress(f"{runner.name}: {row['error']}")
                rounds.append(row)
            after = ceilings()
            measured.append({"case": case.name, "round": number, **middle([before, after]).rounded()})
            before = after
            save(result(False))
    return result(True)


def _run(runner: Runner, case: Case, prompts: list[list[int]], late: list[int]) -> dict[str, Any]:
    timing = runner.generate(prompts, case.output_tokens, late or None)
    if not case.says_something(timing):
        return {"error": "a stream ended before all had begun: give a larger --max-num-batched-tokens"}
    row = {
        "tokens_per_s": round(case.rate(timing), 2),
        "first_s": round(timing.first, 5),
        "finished_s": round(timing.finished, 5),
    }
    if late:
        row["loss"] = round(mixed_loss(timing, *_apart(runner, case, prompts, late)), 4)
    return row


def _apart(runner: Runner, case: Case, prompts: list[list[int]], late: list[int]) -> tuple[Timing, Timing]:
    """The parts of a mixed case one after the other: the late prompt alone, the streams alone."""
    return runner.generate([late], 1), runner.generate(prompts, case.output_tokens)


def _whole_rounds(earlier: dict | None, names: list[str]) -> tuple[list[dict], list[dict]]:
    """Of a result that was cut short, the (case, round)s in which every runner was measured."""
    if not earlier:
        return [], []
    ran = Counter((row["case"], row["round"]) for row in earlier["rounds"] if row["runner"] in names)
    whole = {key for key, count in ran.items() if count == len(names)}
    ceilings = [row for row in earlier["ceilings"] if (row["case"], row["round"]) in whole]
    whole &= {(row["case"], row["round"]) for row in ceilings}
    return [row for row in earlier["rounds"] if (row["case"], row["round"]) in whole], ceilings


def _median_row(
    case: Case, runners: Sequence[Runner], rounds: list[dict], measured: list[dict], limit: Limit
) -> dict[str, Any]:
    def of(name: str, key: str) -> dict[int, float]:
        return {
            row["round"]: row[key]
            for row in rounds
            if row["case"] == case.name and row["runner"] == name and row.get(key) is not None
        }

    limits = {
        row["round"]: limit(case, Ceilings(*(row[key] for key in ("read_bytes", "float_ops", "int8_ops"))))
        for row in measured
        if row["case"] == case.name
    }
    row: dict[str, Any] = {"case": case.name, "panel": case.panel, "limit": _median(filter(None, limits.values()), 2)}
    for runner in runners:
        row[runner.name] = _median(of(runner.name, "tokens_per_s").values(), 2)
    for runner in runners[1:]:
        mine, other = row[runners[0].name], row[runner.name]
        row[f"ratio to {runner.name}"] = round(mine / other, 3) if mine and other else None
    mine, most = row[runners[0].name], row["limit"]
    row["share"] = round(mine / most, 4) if mine and most else None  # of what the row shows
    for runner in runners if case.counts == "mixed" else ():
        row[f"loss {runner.name}"] = _median(of(runner.name, "loss").values(), 4)
    return row


def _median(values, digits: int) -> float | None:
    values = list(values)
    return round(statistics.median(values), digits) if values else None


def run_engine_bench(
    config: EngineConfig,
    cases: Sequence[Case],
    *,
    against: Sequence[str] = (),
    peer_models: Sequence[str] = (),
    peer_python: str = sys.executable,
    repeat: int = 3,
    seed: int = 1,
    earlier: dict | None = None,
    progress: Callable[[str], None] = lambda text: None,
    save: Save = lambda result: None,
) -> dict:
    """Load ours, start a peer with the same threads on each of `peer_models` ("same" is our file), run the cases.

    Cases longer than the model's context are left out and listed under "skipped". Raises SetupError, ConfigError.
    """
    for name in against:
        if name != "llama-cpp":
            raise ConfigError(f"--against {name!r}: the engine benchmark knows llama-cpp")
    if peer_models and not against:
        raise ConfigError("--peer-model needs --against llama-cpp")
    config = replace(config, max_num_seqs=max(config.max_num_seqs, *(case.sequences for case in cases)))
    progress("loading tokenmill")
    ours = TokenmillRunner(config)
    runners: list[Runner] = [ours]
    try:
        resolved, checkpoint = ours.loaded.resolved, ours.loaded.checkpoint
        fitting = [case for case in cases if case.longest <= resolved.max_model_len]
        skipped = [case for case in cases if case not in fitting]
        if not fitting:
            longest = min(case.longest for case in cases)
            raise ConfigError(f"a case needs {longest} tokens; the context is {resolved.max_model_len}")
        for case in skipped:
            progress(f"left out: {case.name} needs {case.longest} tokens, the context is {resolved.max_model_len}")
        peers: dict[str, dict] = {}
        for given in (peer_models or ["same"]) if against else []:
            path = checkpoint.path if given == "same" else Path(given)
            if given == "same" and checkpoint.kind != "gguf":
                raise ConfigError("llama-cpp reads GGUF files only; give a GGUF model, or --peer-model FILE")
            name = _peer_name(path, checkpoint.path, peers)
            progress(f"starting {name}")
            peer = LlamaCppRunner(path, threads=resolved.num_threads, python=peer_python, name=name)
            runners.append(peer)
            peers[name] = {"version": peer.version, "format": main_format(path), **peer.settings}
        head = {
            "machine": describe(),
            "model": checkpoint.name,
            "model_digest": checkpoint.digest,
            "format": _commonest(ours.loaded.model.program.weights),
            "decisions": [list(decision) for decision in ours.loaded.decisions],
            "peers": peers,
            "skipped": [case.name for case in skipped],
        }
        if earlier and (earlier.get("model_digest"), set(earlier.get("peers", ()))) != (checkpoint.digest, set(peers)):
            raise ConfigError(f"the run to go on with was of {earlier.get('model')} beside {list(earlier['peers'])}")
        number_bytes = KV_CACHE_BYTES[config.kv_cache_dtype]
        results = run_cases(
            runners,
            fitting,
            vocab_size=min([ours.vocab_size, *(r.vocab_size for r in runners if isinstance(r, LlamaCppRunner))]),
            ceilings=lambda: measure_ceilings(resolved.num_threads, config.isa),
            limit=lambda case, ceilings: case.limit(ours.loaded.model.program, ceilings, number_bytes),
            repeat=repeat,
            seed=seed,
            earlier=earlier,
            progress=progress,
            save=lambda partial: save({**head, **partial}),
        )
        return {**head, **results}
    finally:
        for runner in runners:
            runner.close()


def _peer_name(path: Path, ours: Path, taken: dict) -> str:
    """llama-cpp on our own file, else with the other file's format."""
    name = "llama-cpp" if Path(path).resolve() == Path(ours).resolve() else f"llama-cpp {main_format(path)}"
    if name in taken:
        raise ConfigError(f"two peers would be called {name!r}; give files of different formats")
    return name


def main_format(path: Path) -> str:
    """The format that holds most bytes of a GGUF file."""
    from ..weights.gguf import open_gguf

    return _commonest(open_gguf(Path(path))[1].values())


def _commonest(tensors) -> str:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.format] += tensor.nbytes
    return sizes.most_common(1)[0][0]
