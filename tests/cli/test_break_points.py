"""Break points: they stop exactly where they are told to, as a straight fold has it, and a step is
one message.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from seriatim.cli import Options
from seriatim.cli.replay import BreakPoint, Stepper, find_stops
from seriatim.operations.inspect.condition import parse_condition
from seriatim.operations.inspect.session_replay import SessionReplay
from seriatim.operations.inspect.tracing import NAMES_AFTER_FOLD, NAMES_BEFORE_FOLD
from seriatim.testing import MemoryStream
from tests.operations.adding_machines import Adder, RaisingAdder, create_adding_stream
from tests.operations.lookback_helper import session_after, session_replay
from tests.operations.memory_streams import create_filled_stream, create_stream


def sums(machine: type[Adder] = Adder, count: int = 30) -> MemoryStream:
    """A world in which one session adds up 0, 1, 2 and so on."""
    made = create_adding_stream(machine)
    made.kafka.create("in-a", 1)
    for number in range(count):
        made.kafka.produce("in-a", "s", json.dumps({"v": number, "start": number == 0}).encode())
        made.kafka.produce("in-a", "t", json.dumps({"v": 1, "start": number == 0}).encode())
    made.run(7)
    return made


def set_out(made: MemoryStream, offset: int = 0, name: str = "s") -> SessionReplay:
    """A way from an offset on."""
    gone = session_replay(made, name)
    gone.begin_at(offset)
    gone.fold_to(offset)
    return gone


def wanting(text: str | None = None, **more: Any) -> BreakPoint:
    """Where to stop."""
    return BreakPoint(
        condition=None
        if text is None
        else parse_condition(text, (*NAMES_BEFORE_FOLD, *NAMES_AFTER_FOLD)),
        **more,
    )


@pytest.mark.parametrize(
    ("condition", "offset"),
    [
        ("offset == 22", 22),
        ("offset > 20 and message.v % 2 == 1", 22),
        ("state.value >= 55", 22),
        ("after.value >= 66", 22),
        ("any(record.value == 66 for record in records)", 22),
        ("sequence is None and time >= 21 and session == 's'", 22),
    ],
)
def test_it_stops_exactly_there(condition: str, offset: int) -> None:
    """Before the message, whether the condition asks for the message, the state, or what the
    message does.
    """
    made = sums()
    gone = set_out(made)
    found = next(find_stops(gone, gone.committed_end, wanting(condition)))
    assert found.offset == offset
    before = made.machine().load(session_after(made, offset - 1).state_bytes or b"", 1)
    assert gone.tracing_fold.copy_of_state() == before
    assert gone.step(found).after.value == before.value + 11


def test_it_stops_at_findings() -> None:
    """And at nothing else."""
    made = create_adding_stream(RaisingAdder)
    made.kafka.create("in-a", 1)
    for v in (1, 2, 99, 3):
        made.kafka.produce("in-a", "s", json.dumps({"v": v, "start": v == 1}).encode())
    made.run()
    gone = set_out(made)
    found = [
        one.offset
        for one in find_stops(gone, gone.committed_end, wanting(on_finding=True))
        if gone.step(one)
    ]
    assert found == [2]


def answers(*given: str) -> Iterator[str]:
    """What is typed, one after the other."""
    yield from given
    yield "q"


def test_a_step_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    """`n` folds the next message of the session, `c` goes to the next break, `s` shows the state,
    `q` ends.
    """
    made = sums()
    stepper = Stepper(set_out(made), 60, wanting("offset == 10 or offset == 30"))
    typed = answers("s", "m", "?", "n", "r", "n", "c", "q")
    stepper.run_interactive(lambda: next(typed))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("●")]
    assert [line.split()[3] for line in shown] == ["10", "12", "14", "30"]
    assert stepper.stop_count == 4


def test_what_is_typed_is_never_code(capsys: pytest.CaptureFixture[str]) -> None:
    """The stepper answers anything else with what it knows."""
    stepper = Stepper(set_out(sums()), 60, wanting(at_every_message=True))
    typed = answers("__import__('os').abort()", "print(1)", "!id")
    stepper.run_interactive(lambda: next(typed))
    assert capsys.readouterr().out.count("n next message") == 3


def test_pdb_stops_inside_the_machines_own_apply(capsys: pytest.CaptureFixture[str]) -> None:
    """Its source is shown, its variables are there, and so are state, message and records under
    these names.
    """
    typed = io.StringIO(
        "p ('seen', state.value, message.v, records)\nnext\nwhere\nlist\ncontinue\n"
    )
    heard = io.StringIO()
    made = sums()
    stepper = Stepper(set_out(made), 60, wanting("offset == 22"))
    stepper.run_debugger((typed, heard))
    said = heard.getvalue()
    assert "('seen', 55, 11, [])" in said
    assert "def apply(self, state: Total, message: Add)" in said
    assert "adding_machines.py" in said
    assert stepper.last_step is not None
    assert stepper.last_step.after.value == 66
    assert "22" in capsys.readouterr().out


def test_quitting_pdb_ends_the_replay() -> None:
    """It is no finding of the machine's, and nothing is folded on."""
    stepper = Stepper(set_out(sums()), 60, wanting("offset >= 22"))
    stepper.run_debugger((io.StringIO("quit\n"), io.StringIO()))
    assert stepper.stop_count == 1


def test_pdb_stops_in_the_stock_machine_too() -> None:
    """Its apply is ours; the rows are there."""
    made = create_filled_stream(1)
    made.run()
    heard = io.StringIO()
    stepper = Stepper(set_out(made), 3, wanting("offset == 2"))
    stepper.run_debugger((io.StringIO("p list(state)\ncontinue\n"), heard))
    assert "['a', 'b']" in heard.getvalue()


def test_without_a_terminal_the_place_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For scripts: one JSON object with where it stopped, the state before, and what the message
    does.
    """
    monkeypatch.setattr(Options, "json", True)
    stepper = Stepper(set_out(sums()), 60, wanting("message.v == 11"))
    stepper.print_first_stop()
    told = json.loads(capsys.readouterr().out)
    assert (told["stopped"], told["state"], told["records"][0]["value"]) == (22, {"value": 55}, 66)


@pytest.mark.parametrize("name", ["quarantined", "damaged"])
@pytest.mark.parametrize(
    "beside", ["", " and outcome != ''", " and len(records) >= 0", " and findings is not None"]
)
def test_whether_it_is_set_aside_means_before_the_message(name: str, beside: str) -> None:
    """Alone and beside what only folding tells: the message that a session is set aside at finds it
    well.
    """
    made = create_stream(tier="strict", sequence="seq")
    made.kafka.create("in-a", 1)
    rows = [{"id": "a", "v": 0}]
    bodies: list[dict[str, Any]] = [{"type": "snapshot", "seq": 1, "rows": rows}]
    bodies += [{"type": "update", "seq": number, "id": "a", "v": number} for number in (2, 3, 5, 6)]
    bodies += [
        {"type": "snapshot", "seq": 7, "rows": rows},
        {"type": "update", "seq": 8, "id": "a", "v": 8},
    ]
    for body in bodies:
        made.kafka.produce("in-a", "s", json.dumps(body).encode())
    made.run()
    gone = session_replay(made)
    gone.begin_at(0)
    wanted = BreakPoint(
        condition=parse_condition(f"{name}{beside}", (*NAMES_BEFORE_FOLD, *NAMES_AFTER_FOLD))
    )
    found = []
    for one in find_stops(gone, gone.committed_end, wanted):
        found.append(one.offset)
        gone.step(one)
    assert found == [4, 5]
