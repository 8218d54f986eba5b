"""Admission of a newcomer to the job that it names: a registration that cannot take effect is refused, never ignored.

A job records its *run* (`J/run`): the identity of the processes that were started together, and the command
of their ranks. A newcomer *takes up* a job if it continues a job that has ended. A newcomer that takes the job up,
or finds no member in it, overwrites the job's run and command with its own. Any other newcomer only adds a run or a
command that is not recorded yet.

    the job      the newcomer                           result
    -----------  -------------------------------------  --------------------------------------------
    done         of the same run, or names none         `JobDone`: nothing is left to do (ADR 0038)
                 of another run, or another command     `Refused`, with the time it finished, both commands
                                                            if they differ, and what to do
    failed       any                                    `JobFailed`
                 ... early; another run                 the job is started again
    done, failed `resume`, `anew`, a newer attempt      the job is taken up, with the newcomer's command
    unfinished   the same command, or none known        joins
                 another one, and there are members     `Conflict`, which names both
                 another program, and no members        `Refused`, unless `resume` or `anew` is set
                 other arguments, and no members        goes on with them
                 another command and `anew`, no members begins anew with it

A `sole` newcomer, whose job got its name from its script, is a `Conflict` while the job has any other member.

A reconnect (a registration with an incarnation) takes no job up, and changes no command.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata.core.job import JobView
from strata.core.kv.records import Command, JobPhase, JobRun, Phase
from strata.core.members.registration import Registration
from strata.core.spans import utc_text
from strata.errors import Conflict, JobDone, JobFailed, Refused, StrataError

_TAKE_UP = (
    "continue it with --resume, start over with --new (its checkpoints stay), or pass another name with --job"
)
NAME_IT = "give this run a name of its own by --job, or stop that one first"
_OTHER_JOB = "choose another name by --job"
_HOW_TO_GO_ON = "start again with --new, or choose another --job; --resume goes on from its last checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The job's state that a newcomer's registration writes.

    `run`: the new value of `J/run`. `taken_up`: for people, how the registration takes the job up; "" if it does
    not. `anew`: the job begins again from nothing. `alone`: the transaction must compare that the job has no
    member.
    """

    run: JobRun
    taken_up: str = ""
    anew: bool = False
    brings_spec: bool = False
    alone: bool = False


def admit(job: JobView, registration: Registration) -> Admission:
    """Return the effect of a registration under a name that no worker key has, or raise the reason for a refusal."""
    admission = _admission(job, registration)
    if not registration.sole:
        return admission
    for other in job.workers():
        where = f" on {other.record.host}" if other.record.host else ""
        raise Conflict(f"job {job.keys.name} runs{where} already", hint=NAME_IT)
    return replace(admission, alone=True)


def refuse_other_command(job: JobView, registration: Registration) -> None:
    """Raise `Conflict` if the registration's command differs from that of a job with members."""
    if (commands := _other_commands(job, registration)) is not None:
        before, now = commands
        raise Conflict(
            f"job {job.keys.name} runs `{before.text}`, and this is `{now.text}`",
            hint=f"{_OTHER_JOB}, or stop that run first",
        )


def _admission(job: JobView, registration: Registration) -> Admission:
    phase = job.view.record(job.keys.phase, JobPhase)
    newer = not registration.incarnation and registration.attempt > job.attempt()
    if phase is not None and phase.phase in {Phase.DONE, Phase.FAILED}:
        return _finished(job, registration, phase, newer=newer)
    if newer:
        taken_up = f"attempt {registration.attempt} begun by {registration.worker}"
        return Admission(taken_up=taken_up, brings_spec=True, run=_brought(job, registration))
    here = job.view.count(job.keys.workers)
    if here or registration.incarnation:
        refuse_other_command(job, registration)
    elif (commands := _other_commands(job, registration)) is not None:
        return _with_another_command(job, registration, *commands)
    if registration.incarnation:
        return Admission(run=job.run())
    return Admission(run=_filled_in(job, registration) if here else _brought(job, registration))


def _other_commands(job: JobView, registration: Registration) -> tuple[Command, Command] | None:
    """Return the job's command and the newcomer's, if both are known and they differ."""
    before, now = job.run().command, registration.command
    return None if before is None or now is None or before.same_as(now) else (before, now)


def _brought(job: JobView, registration: Registration) -> JobRun:
    """Return the newcomer's run and command; if the newcomer does not name one of them, the job's."""
    before = job.run()
    return JobRun(run_id=registration.run_id or before.run_id, command=registration.command or before.command)


def _filled_in(job: JobView, registration: Registration) -> JobRun:
    """Return the job's run and command; if one of them is not recorded, the newcomer's."""
    before = job.run()
    return JobRun(run_id=before.run_id or registration.run_id, command=before.command or registration.command)


def _with_another_command(
    job: JobView, registration: Registration, before: Command, now: Command
) -> Admission:
    if before.program != now.program and not (registration.anew or registration.resume):
        raise Refused(
            f"job {job.keys.name} is unfinished and runs `{before.text}`, and this is `{now.text}`",
            hint=f"{_OTHER_JOB}; or start the job over with this program by --new (its checkpoints stay),"
            " or continue from its checkpoint with this program by --resume",
        )
    how = "started over" if registration.anew else "going on"
    return Admission(
        taken_up=f"{how} with `{now.text}` by {registration.worker}, after `{before.text}`",
        anew=registration.anew,
        brings_spec=registration.anew,
        run=_brought(job, registration),
        alone=True,
    )


def _finished(job: JobView, registration: Registration, phase: JobPhase, *, newer: bool) -> Admission:
    same_run = registration.run_id in {"", job.run().run_id}
    how = ""
    if registration.incarnation:
        pass  # a reconnect takes nothing up
    elif registration.anew:
        how = "started over"
    elif newer:
        how = f"attempt {registration.attempt} begun"
    elif registration.resume:
        how = "resumed"
    elif phase.phase is Phase.FAILED and phase.early and not same_run:
        how = "started again"
    if not how:
        raise _over(job, registration, phase, same_run=same_run)
    return Admission(
        taken_up=f"{how} by {registration.worker}",
        anew=registration.anew,
        brings_spec=newer or registration.anew or not registration.resume,
        run=_brought(job, registration),
    )


def _over(job: JobView, registration: Registration, phase: JobPhase, *, same_run: bool) -> StrataError:
    name, latest = job.keys.name, job.latest()
    # a newcomer without a command is a program of its own, which has no options of `strata run`
    own = registration.command is None
    optionless = f"give the job another name, or delete this one by strata jobs delete {name}" if own else ""
    if phase.phase is Phase.FAILED:
        if own and latest is not None:
            optionless = (
                f"give the job another name to start over, or delete this one by strata jobs delete {name}, which"
                f" forgets its checkpoints; strata run --resume continues from step {latest.record.step}"
            )
        return JobFailed(f"job {name} has failed: {phase.reason}", hint=optionless or _TAKE_UP)
    commands = _other_commands(job, registration)
    if registration.incarnation or (same_run and commands is None):
        return JobDone(f"job {name} is done: {phase.reason}", hint=optionless or _TAKE_UP)
    when = f" at {utc_text(phase.ended_unix_ms)}" if phase.ended_unix_ms else ""
    after = f" after {latest.record.step:,} steps" if latest is not None else ""
    both = f"; it ran `{commands[0].text}`, and this is `{commands[1].text}`" if commands is not None else ""
    return Refused(f"job {name} finished{when}{after}{both}", hint=optionless or _HOW_TO_GO_ON)
