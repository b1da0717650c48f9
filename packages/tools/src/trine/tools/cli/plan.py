"""`trine plan`: what a run would take, before there is hardware for it."""

from __future__ import annotations

import json

import click

from trine.tools.cli.paths import one_sentence_errors
from trine.tools.text import printable

__all__ = ["plan"]

_PRECISIONS = ["fp32", "amp_bf16", "amp_fp16", "bf16", "fp16"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option(
    "--mesh",
    "meshes",
    multiple=True,
    required=True,
    metavar="AXES",
    help="shard=8, or replicate=2,shard=4. Give it again to compare.",
)
@click.option(
    "--precision",
    type=click.Choice(_PRECISIONS, case_sensitive=False),
    default="fp32",
    show_default=True,
    help="amp_: fp32 parameters that are gathered and computed with in the smaller type.",
)
@click.option(
    "--units",
    metavar="NAMES|SIZE",
    help="Classes of modules that are units (Block,Embedding), or the least number of parameters "
    "of one (10M). Default: the members of module lists.",
)
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    help="A class of torch.optim, with arguments: sgd:momentum=0.9.",
)
@click.option(
    "--batch",
    "batches",
    multiple=True,
    metavar="SHAPE[:DTYPE]",
    help="An input of the forward on one rank, 8x2048:int64, to count activations.",
)
@click.option(
    "--reshard-after-forward",
    "reshard",
    default="auto",
    show_default=True,
    metavar="auto|yes|no|N",
    help="As fully_shard takes it.",
)
@click.option("--offload", is_flag=True, help="Shards, gradients and state in host memory.")
@click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo", "mpi"]),
    default="nccl",
    show_default=True,
    help="Who carries the bytes; buffers differ.",
)
@click.option("--memory", metavar="SIZE", help="What a rank has, such as 80GiB: says if it fits.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
def plan(
    model: str,
    meshes: tuple[str, ...],
    precision: str,
    units: str | None,
    optimizer: str,
    batches: tuple[str, ...],
    reshard: str,
    offload: bool,
    backend: str,
    memory: str | None,
    as_json: bool,
) -> None:
    """Tell what training a model takes of each rank: memory by category, bytes per step.

    MODEL is package.module:factory, a function or class that makes the model when it is called
    without arguments; the current folder is searched too. Nothing is allocated, and no ranks
    are started.
    """
    with one_sentence_errors():
        import torch

        from trine.core import Precision
        from trine.core.planning import PlanError, PlanRequest, find_planner
        from trine.tools.planning import arguments
        from trine.tools.planning.model import build_on_meta
        from trine.tools.reports.plan_table import plan_data, print_plans

        planner = find_planner()
        chosen = Precision.parse(precision)
        policy = chosen.fsdp_policy_args()
        try:
            arguments.place_of(model)
            room = None if memory is None else arguments.nbytes_of(memory)
            requests = [
                PlanRequest(
                    **arguments.mesh_of(mesh),
                    units=arguments.units_of(units),
                    param_dtype=policy["param_dtype"],
                    reduce_dtype=policy["reduce_dtype"],
                    optimizer=optimizer,
                    reshard_after_forward=arguments.reshard_of(reshard),
                    offload=offload,
                    backend=backend,
                    inputs=tuple(arguments.batch_of(batch) for batch in batches),
                )
                for mesh in meshes
            ]
        except PlanError as error:
            raise click.UsageError(str(error)) from error
        stored = None if chosen.param_dtype is torch.float32 else chosen.param_dtype
        built = build_on_meta(model, stored)
        plans = [planner.plan(built, request) for request in requests]
    if as_json:
        click.echo(json.dumps(plan_data(plans, room)))
    else:
        print_plans(plans, f"{printable(model)}, {chosen.value}, {printable(optimizer)}", room)
