"""The verb on the steps of an RL task."""

from __future__ import annotations

import click

from tangram import Client
from tangram.cli.options import connected, json_option
from tangram.cli.printing import brief
from tangram.cli.printing.output import print_json, show, table


@click.command()
@click.argument("task")
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option("--expected", type=click.IntRange(min=1), help="Tell that STEP is to have so many rollouts.")
@json_option
@connected
def steps(client: Client, task: str, step: int | None, expected: int | None, as_json: bool) -> None:
    """Steps of TASK that the gateway keeps, that opened last first; or of STEP alone.

    Rollouts are trajectories that were opened under a step, and calls of none that name it.
    """
    if expected is not None:
        if step is None:
            raise click.UsageError("--expected tells of a step: name it, tangram steps TASK STEP --expected N")
        found = [client.tell_step(task, step, expected=expected)]
    else:
        found = [each for each in client.steps(task) if step in (None, each.step)]
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each.step,
            each.expected,
            each.living,
            each.ended,
            f"{each.opened_at:%Y-%m-%d %H:%M:%S}",
            None if each.ended_at is None else brief.seconds((each.ended_at - each.opened_at).total_seconds()),
            None if each.ends_in_s is None else brief.seconds(each.ends_in_s),
        )
        for each in found
    ]
    show(table(("STEP", "EXPECTED", "LIVING", "ENDED", "OPENED", "TOOK", "ENDS IN"), rows))
