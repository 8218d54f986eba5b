"""What a newcomer means for the job that it names: a job's name never silently runs nothing.

A job remembers its *run* (`J/run`): the identity of those that were started together, and the command
that their ranks run. Who takes the job up, or finds no member in it, brings them; others bring what nobody
has said yet. Who says neither takes none away.

    the job      the newcomer                           what follows
    -----------  -------------------------------------  --------------------------------------------
    done         of the same run, or of none known      `JobDone`: nothing is left to do (ADR 0038)
                 of another run, or another command     `Refused`: when it finished, both commands if they
                                                            differ, and what to do
    failed       any                                    `JobFailed`
                 ... early; another run                 it is started again
    done, failed `resume`, `anew`, a newer attempt      it is taken up, with the newcomer's command
    unfinished   the same command, or none known        joins
                 another one, and members are here      `Conflict`, which names both
                 another program, and nobody is here    `Refused`, unless `resume` or `anew` say so
                 other arguments, and nobody is here    goes on with them
                 another command and `anew`, nobody     begins anew with it

A `sole` newcomer, whose job got its name from its script, is a `Conflict` while anybody else is a member.

A reconnect (a registration with an incarnation) takes nothing up, and changes no command.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata.core.job import JobView
from strata.core.records import Command, JobPhase, JobRun, Phase
from strata.core.registration import Registration
from strata.core.spans import utc_text
from strata.errors import Conflict, JobDone, JobFailed, Refused, StrataError

_TAKE_UP = (
    "go on with it by --resume, begin it anew by --new (its checkpoints stay), or give another name by --job"
)
NAME_IT = "give this run a name of its own by --job, or stop that one first"
_OTHER_JOB = "choose another name by --job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """How a newcomer joins: refused; or else what its registration writes of the job.

    `taken_up`: how the job is taken up by it, for people; "" where it goes on as it is. `anew`: from nothing.
    `run`: what `J/run` is from now on; None: as it was. `alone`: it rests on nobody being a member.
    """

    refusal: StrataError | None = None
    taken_up: str = ""
    anew: bool = False
    brings_spec: bool = False
    run: JobRun | None = None
    alone: bool = False


def admit(job: JobView, registration: Registration) -> Admission:
    """Return what follows from a registration under a name that no key holds."""
    admission = _admission(job, registration)
    if admission.refusal is not None or not registration.sole:
        return admission
    for other in job.workers():
        where = f" on {other.record.host}" if other.record.host else ""
        return Admission(refusal=Conflict(f"job {job.keys.name} runs{where} already", hint=NAME_IT))
    return replace(admission, alone=True)


def _admission(job: JobView, registration: Registration) -> Admission:
    phase = job.view.record(job.keys.phase, JobPhase)
    fresh = not registration.incarnation
    newer = fresh and registration.attempt > job.attempt()
    if phase is not None and phase.phase in {Phase.DONE, Phase.FAILED}:
        return _finished(job, registration, phase, newer=newer)
    if newer:
        taken_up = f"attempt {registration.attempt} begun by {registration.worker}"
        return Admission(taken_up=taken_up, brings_spec=True, run=_brought(job, registration))
    here = job.view.count(job.keys.workers)
    if _differs(job.run().command, registration.command):
        return _with_another_command(job, registration, here)
    if not fresh:
        return Admission()
    return Admission(run=_brought(job, registration) if not here else _filled_in(job, registration))


def other_command(job: JobView, registration: Registration) -> Conflict | None:
    """Return the refusal of who brings another command to a job that members train; None if it is the same."""
    before = job.run().command
    if before is None or registration.command is None or before.same_as(registration.command):
        return None
    return Conflict(
        f"job {job.keys.name} runs `{before.text}`, and this is `{registration.command.text}`",
        hint=f"{_OTHER_JOB}, or stop that run first",
    )


def _differs(before: Command | None, now: Command | None) -> bool:
    return before is not None and now is not None and not before.same_as(now)


def _brought(job: JobView, registration: Registration) -> JobRun | None:
    """Return the run that the job belongs to from now on; None where that says nothing new."""
    before = job.run()
    run = JobRun(run_id=registration.run_id or before.run_id, command=registration.command or before.command)
    return None if run == before else run


def _filled_in(job: JobView, registration: Registration) -> JobRun | None:
    """Return the job's run with what its members have not said; None where that says nothing new."""
    before = job.run()
    run = JobRun(run_id=before.run_id or registration.run_id, command=before.command or registration.command)
    return None if run == before else run


def _with_another_command(job: JobView, registration: Registration, here: int) -> Admission:
    before, now = job.run().command, registration.command
    if before is None or now is None:
        raise AssertionError("two commands that are not known do not differ")
    if here or registration.incarnation:
        return Admission(refusal=other_command(job, registration))
    if before.program != now.program and not (registration.anew or registration.resume):
        refusal = Refused(
            f"job {job.keys.name} is unfinished and runs `{before.text}`, and this is `{now.text}`",
            hint=f"{_OTHER_JOB}; or begin the job anew with this program by --new (its checkpoints stay),"
            " or go on from its checkpoint with it by --resume",
        )
        return Admission(refusal=refusal)
    how = "begun anew" if registration.anew else "going on"
    return Admission(
        taken_up=f"{how} with `{now.text}` by {registration.worker}, after `{before.text}`",
        anew=registration.anew,
        brings_spec=registration.anew,
        run=_brought(job, registration),
        alone=True,
    )


def _finished(job: JobView, registration: Registration, phase: JobPhase, *, newer: bool) -> Admission:
    run, worker = job.run(), registration.worker
    same_run = not registration.run_id or registration.run_id == run.run_id
    taken_up = ""
    if registration.anew:
        taken_up = f"begun anew by {worker}"
    elif newer:
        taken_up = f"attempt {registration.attempt} begun by {worker}"
    elif registration.resume:
        taken_up = f"resumed by {worker}"
    elif phase.phase is Phase.FAILED and phase.early and not same_run:
        taken_up = f"started again by {worker}"
    if taken_up and not registration.incarnation:
        return Admission(
            taken_up=taken_up,
            anew=registration.anew,
            brings_spec=newer or registration.anew or not registration.resume,
            run=_brought(job, registration),
        )
    return Admission(refusal=_over(job, registration, phase, same_run=same_run))


def _over(job: JobView, registration: Registration, phase: JobPhase, *, same_run: bool) -> StrataError:
    name = job.keys.name
    # who names no command is a program of its own, which has no options of `strata run`
    own = registration.command is None
    optionless = f"give the job another name, or delete this one by strata jobs delete {name}" if own else ""
    if phase.phase is Phase.FAILED:
        latest = job.latest()
        if own and latest is not None:
            optionless = (
                f"give the job another name to begin anew, or delete this one by strata jobs delete {name}, which"
                f" forgets its checkpoints; step {latest.record.step} is there to go on from by strata run --resume"
            )
        return JobFailed(f"job {name} has failed: {phase.reason}", hint=optionless or _TAKE_UP)
    ran, now = job.run().command, registration.command
    both = ""
    if ran is not None and now is not None and not ran.same_as(now):
        both = f"; it ran `{ran.text}`, and this is `{now.text}`"
    if (both or not same_run) and not registration.incarnation:
        return Refused(f"job {name} {_how_it_finished(job, phase)}{both}", hint=optionless or _HOW_TO_GO_ON)
    return JobDone(f"job {name} is done: {phase.reason}", hint=optionless or _TAKE_UP)


_HOW_TO_GO_ON = "start again with --new, or choose another --job; --resume goes on from its last checkpoint"


def _how_it_finished(job: JobView, phase: JobPhase) -> str:
    latest = job.latest()
    when = f" at {utc_text(phase.ended_unix_ms)}" if phase.ended_unix_ms else ""
    after = f" after {latest.record.step:,} steps" if latest is not None else ""
    return f"finished{when}{after}"
