"""A stand-in for a rank of a training run: Megatron's log lines and events, without Megatron.

Environment variable FAKE_RANK:

- empty: train to the end, evaluate, write events and model.json
- ``error``: the last rank records FAKE_ERROR and ends
- ``raise``: rank 0 fails, and then the others, which lose their peer
- ``hang``: never end; every rank writes its id into FAKE_PIDS
- ``full``: the last rank writes into its run folder until the disk, a small one, is full
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

RANK, LAST = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
BEHAVIOUR = os.environ.get("FAKE_RANK", "")


def loss_at(iteration: int) -> float:
    return 2.0 + 3.5 * math.exp(-iteration / 10)


class Events:
    """The scalars Megatron writes, in the file format torch's SummaryWriter writes."""

    def __init__(self, folder: str | None) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(folder) if RANK == LAST and folder else None

    def add(self, tag: str, loss: float, iteration: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is not None:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=loss)])
            self._writer.add_event(Event(wall_time=time.time(), step=iteration, summary=summary))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def fail(message: str) -> NoReturn:
    """End as a rank does that records its error for torch's elastic agent."""
    extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
    record = {"message": {"message": message, "extraInfo": extra}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record))
    sys.exit(1)


def misbehave(args: argparse.Namespace) -> None:
    if BEHAVIOUR == "error" and RANK == LAST:
        fail(os.environ.get("FAKE_ERROR", "ConfigError: expected 4, got 6."))
    if BEHAVIOUR == "raise":
        time.sleep(0.05 * (RANK != 0))
        fail("RuntimeError: Connection closed by peer" if RANK else "ValueError: no weight")
    if BEHAVIOUR == "full" and RANK == LAST:
        with (Path(args.save).parent / "state").open("wb", buffering=0) as file:
            for _ in range(64):
                file.write(bytes(2**20))
    if BEHAVIOUR == "hang":
        pids = Path(os.environ["FAKE_PIDS"]) / str(RANK)
        pids.with_suffix(".tmp").write_text(str(os.getpid()))
        pids.with_suffix(".tmp").rename(pids)
        time.sleep(600)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--train-iters", type=int, default=6)
    parser.add_argument("--eval-interval", type=int, default=2)
    for flag in ("--tensorboard-dir", "--save", "--load"):
        parser.add_argument(flag)
    parser.add_argument("--ckpt-step", type=int)
    return parser.parse_known_args()[0]


def main() -> None:
    if sys.argv[1:2] == ["--check"]:
        print(json.dumps({"cpu": True, "faults": []}))
        return
    args = parse()
    start = 0
    if args.load:
        tracked = (Path(args.load) / "latest_checkpointed_iteration.txt").read_text()
        start = args.ckpt_step or int(tracked)
    if RANK == 0:
        print(f"arguments: {json.dumps(sys.argv[1:])}")
    misbehave(args)
    events = Events(args.tensorboard_dir)
    for iteration in range(start + 1, args.train_iters + 1):
        events.add("lm loss", loss_at(iteration), iteration)
        if iteration % args.eval_interval == 0:
            events.add("lm loss validation", loss_at(iteration) + 0.25, iteration)
    for where, extra in (("validation", 0.3), ("test", 0.5)):
        loss = loss_at(args.train_iters) + extra
        events.add("lm loss validation", loss, args.train_iters)
        place = f"iteration {args.train_iters} on {where} set"
        print(f" validation loss at {place} | lm loss value: {loss:.6E} | lm loss PPL: 1.0E+01 | ")
    events.close()
    if RANK == 0 and args.save:
        model = {"optimizer": "FakeOptimizer", "format": "mxfp8", "rank0": {}}
        model |= {"parameters": 1_000_000, "quantized_parameters": 750_000}
        (Path(args.save).parent / "model.json").write_text(json.dumps(model))


if __name__ == "__main__":
    main()
