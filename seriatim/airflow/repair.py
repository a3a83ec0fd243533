"""The tasks of a repair: make and show the plan, have a person approve it, apply exactly that plan.

The plan has an approval. `seriatim repair --apply` refuses the approval if epochs or halts changed
since the plan was made.

Next: dags/repair.py makes a DAG of these tasks; cli/repair.py is the command that they run.
"""

from __future__ import annotations

import textwrap
import time
from typing import Any

import msgspec
from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk.exceptions import AirflowSkipException

from seriatim.airflow import environment
from seriatim.airflow.command import CommandOperator
from seriatim.airflow.fold import FoldOperator
from seriatim.alerts.incidents import REPAIR, Note
from seriatim.errors import IntegrityError
from seriatim.operations.repair_text import action_lines, fact_lines, held_by_repair
from seriatim.operations.run_request import repair_arguments

PLAN_WIDTH_MAX = 64
"""Characters in a line of a plan: Airflow's panel of required actions shows no more at 1300 pixels."""
FACT_MARGIN = 12
REJECTED_TEXT = (
    "rejected: nothing was changed, and the damage is still there; "
    "trigger this DAG again for another plan, or see `seriatim status %s`"
)


class RepairPlanOperator(CommandOperator):
    """Makes the plan, and hands its text to the task that asks for the approval."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(arguments=["repair"], **kwargs)

    def build_arguments(self, context: Any) -> list[str]:
        """The plan that the form asks for, as JSON, since that has the approval."""
        self.stream = str(context["params"]["stream"])
        return [*repair_arguments(dict(context["params"])), "--json"]

    def is_requested_by_form(self, context: Any) -> bool:  # noqa: ARG002  # Airflow's context is not needed
        """Always: a repair is only started by its form."""
        return True

    def is_success(self, code: int, stdout: str) -> bool:
        """A plan that does not repair everything counts as well: its notes say what it leaves out."""
        return code == 0 or (code == IntegrityError.exit_code and bool(stdout))

    def execute(self, context: Any) -> dict[str, str]:
        """Return the plan's text and its approval.

        The task fails if no repair helps. If nothing is damaged it succeeds without an approval, and
        the tasks that follow are skipped.
        """
        plan = msgspec.json.decode(self.run_command(context))
        # A plan that only ends a hold, or only deletes files, has to be approved as well.
        if plan["parts"] or plan["drops"] or plan["resumes"]:
            return {"approval": plan["approval"], "text": render_plan_markdown(plan)}
        if plan["notes"]:
            notes = "\n".join(plan["notes"])
            error = IntegrityError(f"{plan['stream']}: no repair can fix the damage", next=notes)
            raise self.report_error(context, error)
        form = context["params"]
        is_about_whole_stream = not any(form.get(key) for key in ("partition", "session", "from"))
        if is_about_whole_stream:
            self._close_repair_incident(context)
        texts = [well["says"] for well in plan["well"]]
        texts.append("nothing is damaged, so there is nothing to approve")
        text = f"{plan['stream']}: {'; '.join(texts)}"
        self.log.info("%s", text)
        return {"approval": "", "text": text}

    def _close_repair_incident(self, context: Any) -> None:
        """Note that an earlier repair that failed is not needed any more."""
        alert_state = environment.open_outbox(self.folder, self.stream).alert_state()
        if REPAIR not in alert_state.open_incidents:
            return
        note = Note(
            kind="good", at_seconds=time.time(), dag=context["dag"].dag_id, run=context["run_id"]
        )
        environment.add_note(self.folder, self.stream, note, self.log)


class ApproveOperator(ApprovalOperator):
    """Asks a person for the approval, and logs it if the answer is no.

    If the plan changes nothing, nobody is asked: the task and those after it are skipped.
    """

    def __init__(self, *, plan_task_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan_task_id = plan_task_id

    def execute(self, context: Any) -> Any:
        """Ask, unless nothing is damaged any more."""
        plan = context["ti"].xcom_pull(task_ids=self.plan_task_id)
        if not plan["approval"]:
            raise AirflowSkipException(plan["text"])
        return super().execute(context)

    def execute_complete(self, context: Any, **answer: Any) -> Any:
        """Go on, or log that nothing was done. Airflow then skips what follows, by raising."""
        if answer["event"].get("chosen_options") == [self.REJECT]:
            self.log.info(REJECTED_TEXT, context["params"]["stream"])
        return super().execute_complete(context, **answer)


class RepairApplyOperator(FoldOperator):
    """Applies the plan that was approved."""

    def __init__(self, *, plan_task_id: str, **kwargs: Any) -> None:
        super().__init__(name="seriatim repair", **kwargs)
        self.plan_task_id = plan_task_id

    def build_arguments(self, context: Any) -> list[str]:
        """The same arguments as the plan's, and its approval."""
        self.stream = str(context["params"]["stream"])
        approval = context["ti"].xcom_pull(task_ids=self.plan_task_id)["approval"]
        return [*repair_arguments(dict(context["params"])), "--apply", f"--approval={approval}"]


def render_plan_markdown(plan: dict[str, Any]) -> str:
    """A plan as a block of code in Markdown, so that names which users chose stay plain text."""
    lines = [f"As of entry {plan['sequence']}, this is done in one commit:"]
    for hold in plan["holds"]:
        lines += _hold_lines(hold, is_resumed=hold["id"] == plan["resumes"])
    for action in plan["parts"]:
        lines += ["", *action_lines(action)]
    lines += [
        f"{path} is damaged, and nothing needs it any more: it is deleted" for path in plan["drops"]
    ]
    lines.append("")
    lines += [f"not repaired by this: {note}" for note in plan["notes"]]
    lines += [
        "",
        "Approve   does this, and folds again what came meanwhile;",
        "          not if another repair or a halt came meanwhile",
        "Reject    changes nothing, and what is damaged waits on",
    ]
    # A backtick would end the block.
    text = "\n".join(map(_wrap_line, "\n".join(lines).splitlines())).replace("`", "'")
    # Airflow's page shows a block without a language as one line.
    return f"```text\n{text}\n```"


def _wrap_line(line: str) -> str:
    """The line in pieces that fit. A longer one would push the buttons out of Airflow's panel."""
    margin = " " * (FACT_MARGIN if line.startswith("  ") else 4)
    return textwrap.fill(
        line,
        PLAN_WIDTH_MAX,
        subsequent_indent=margin,
        replace_whitespace=False,
        # Names of topics and files have hyphens. They are copied from here.
        break_on_hyphens=False,
    )


def _hold_lines(hold: dict[str, Any], *, is_resumed: bool) -> list[str]:
    headline = f"{hold['held']} is {held_by_repair(hold['id'])}"
    if is_resumed:
        headline += "; this goes on with it"
    facts = {label: hold[label] for label in ("asked", "give up")}
    return ["", headline, *fact_lines(facts)]
