"""Old address of a name that engine/fold.py defines."""

from seriatim.engine.fold import Tally as Tally
