"""Repair as tasks: the plan is made and shown, a person approves it, and exactly that plan is
applied.

The approval is the plan's own token: `seriatim repair --apply` refuses it if epochs or halts
changed since.

Next room: dags/repair.py wires them; cli/repair.py is what they run.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk.exceptions import AirflowSkipException

from seriatim.airflow import environment
from seriatim.airflow.command import CommandOperator
from seriatim.airflow.fold import FoldOperator
from seriatim.airflow.run_request import repair_arguments
from seriatim.alerts.incidents import REPAIR, Note
from seriatim.errors import IntegrityError

REJECTED_TEXT = (
    "rejected: nothing was changed, and what is hurt still waits; "
    "trigger this DAG again for another plan, or see `seriatim status %s`"
)


class RepairPlanOperator(CommandOperator):
    """Makes the plan, and says it to whoever is to approve it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(arguments=["repair"], **kwargs)

    def build_arguments(self, context: Any) -> list[str]:
        """As the form asks, for scripts: the token is in it."""
        self.stream = str(context["params"]["stream"])
        return [*repair_arguments(dict(context["params"])), "--json"]

    def is_requested_by_form(self, context: Any) -> bool:  # noqa: ARG002  # it has a form always
        """Nobody else starts a repair."""
        return True

    def is_success(self, code: int, stdout: str) -> bool:
        """A plan is one also if it does not mend everything: its notes say what it leaves."""
        return code == 0 or (code == IntegrityError.exit_code and bool(stdout))

    def execute(self, context: Any) -> dict[str, str]:
        """The plan as a text, and its token."""
        plan = msgspec.json.decode(self.run_command(context))
        if plan["parts"] or plan["drops"] or plan["resumes"]:
            return {"approval": plan["approval"], "text": render_plan_markdown(plan)}
        if plan["notes"]:
            notes = "\n".join(plan["notes"])
            raise self.report_error(
                context,
                IntegrityError(f"{plan['stream']}: no repair mends what is hurt", next=notes),
            )
        if not any(context["params"].get(field) for field in ("partition", "session", "from")):
            self._note_well(context)
        raise AirflowSkipException(
            f"{plan['stream']}: nothing is hurt, so there is nothing to approve"
        )

    def _note_well(self, context: Any) -> None:
        """A repair that failed earlier is not needed any more: nothing of the whole stream is hurt."""
        note = Note(
            kind="good", at_seconds=time.time(), dag=context["dag"].dag_id, run=context["run_id"]
        )
        if REPAIR in environment.open_outbox(self.folder, self.stream).alert_state().open_incidents:
            environment.add_note(self.folder, self.stream, note, self.log)


class ApproveOperator(ApprovalOperator):
    """Asks a person; a no is said as such."""

    def execute_complete(self, context: Any, **answer: Any) -> Any:
        """Go on, or say that nothing was done and skip what follows, which Airflow does by raising."""
        if answer["event"].get("chosen_options") == [self.REJECT]:
            self.log.info(REJECTED_TEXT, context["params"]["stream"])
        return super().execute_complete(context, **answer)


class RepairApplyOperator(FoldOperator):
    """Applies the plan that was approved."""

    def __init__(self, *, plan_task_id: str, **kwargs: Any) -> None:
        super().__init__(stream="repair", **kwargs)
        self.plan_task_id = plan_task_id

    def build_arguments(self, context: Any) -> list[str]:
        """The same words as the plan's, with its token."""
        self.stream = str(context["params"]["stream"])
        approval = context["ti"].xcom_pull(task_ids=self.plan_task_id)["approval"]
        return [*repair_arguments(dict(context["params"])), "--apply", f"--approval={approval}"]


def render_plan_markdown(plan: dict[str, Any]) -> str:
    """A plan in Markdown, what users named in it as plain text."""
    lines = [f"As of entry {plan['sequence']}, this is done in one commit:"]
    for hold in plan["holds"]:
        on = "; this goes on with it" if hold["id"] == plan["resumes"] else ""
        lines += [
            "",
            f"{hold['held']} is held by repair {hold['id']}{on}",
            f"  asked     {hold['asked']}",
        ]
        lines += [f"  give up   {hold['give up']}"]
    for part in plan["parts"]:
        lines += ["", f"{part['partition']}  {part['does']}", f"  why       {part['why']}"]
        if part.get("messages") is not None:
            lines.append(f"  reads     at most {part['messages']} messages")
    lines += [
        f"{path} is damaged, and nothing needs it any more: it is deleted" for path in plan["drops"]
    ]
    lines += ["", *(f"not mended by this: {note}" for note in plan["notes"])]
    text = "\n".join(lines).replace("`", "'")
    return f"```\n{text}\n```"
