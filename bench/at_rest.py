"""What sessions at rest cost: a slice that touches 1,000 sessions, in a partition that has no others,
and in one that has a million.

    python -m bench.at_rest                     # into results/at_rest.json
    python -m bench.at_rest --sessions 100000 --rounds 3

Both tasks run by turns in one process, so that a busy machine slows both. CPU of the process.

Next: growth.py has the same slice at other amounts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from bench.growth import PARTITION, current_load, fill_partition, fold_batches, total_bytes
from bench.run import RESULTS
from seriatim import context
from seriatim.engine.files import File, save_state
from seriatim.stream_files import StreamFile

TOUCHED_SESSIONS = 1_000
SESSIONS_PER_SLICE = 100_000
DIGITS = 3


def add_sessions_at_rest(
    file: StreamFile, state: tuple[File, ...], sessions: int
) -> tuple[File, ...]:
    """State files with so many more sessions, saved in slices as a fold does. Their names lie between
    those that are there.
    """
    store = context.state(file)
    some_sessions = list(dict(store.all_sessions(state)).items())
    per_session = sessions // len(some_sessions)
    slice_sessions = {}
    slices = 0
    for turn in range(per_session):
        for name, session in some_sessions:
            # No two sessions are at the same offset.
            offset = session.last_offset + turn * len(some_sessions)
            slice_sessions[f"{name}-{turn:06}"] = replace(session, last_offset=offset)
        if len(slice_sessions) >= SESSIONS_PER_SLICE or turn == per_session - 1:
            stem = f"0-0-rest-{slices}"
            state = save_state(store, PARTITION, stem, slice_sessions, state)
            slice_sessions = {}
            slices += 1
    return state


def measure(folder: Path, sessions: int, rounds: int) -> dict[str, object]:
    """CPU seconds of both tasks, and how many times more the one beside sessions at rest takes."""
    amounts = (TOUCHED_SESSIONS, sessions)
    prepared = {}
    for amount in amounts:
        (folder / str(amount)).mkdir()
        file, batches, state = fill_partition(folder / str(amount), TOUCHED_SESSIONS)
        if amount > TOUCHED_SESSIONS:
            state = add_sessions_at_rest(file, state, amount - TOUCHED_SESSIONS)
        prepared[amount] = file, batches, state
    seconds: dict[int, list[float]] = {amount: [] for amount in amounts}
    # The first round loads what is loaded once, and does not count.
    for turn in range(rounds + 1):
        for amount in amounts:
            file, batches, state = prepared[amount]
            began = time.process_time()
            fold_batches(file, batches, state)
            if turn:
                seconds[amount].append(time.process_time() - began)
    few, many = (seconds[amount] for amount in amounts)
    state = prepared[sessions][2]
    return {
        "sessions": sessions,
        "rounds": rounds,
        "cpu_seconds_alone": [round(value, DIGITS) for value in few],
        "cpu_seconds_beside_others": [round(value, DIGITS) for value in many],
        "ratio_best": round(min(many) / min(few), 2),
        "ratio_median": round(median(many) / median(few), 2),
        "state_files": len(state),
        "state_bytes": total_bytes(state),
        "load": current_load(),
    }


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.sessions, options.rounds)
    text = json.dumps(figures, indent=2) + "\n"
    print(text, end="")
    (RESULTS / "at_rest.json").write_text(text)


if __name__ == "__main__":
    main()
