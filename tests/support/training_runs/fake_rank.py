"""A stand-in for a rank of a training run: Megatron's log lines and events, without Megatron.

What it does is told by the environment variable FAKE_RANK:

- empty: train to the end, evaluate, write events and model.json
- ``error``: the last rank prints a known error, or FAKE_ERROR, and ends
- ``refuse``: as ``error``, with the exit code of a refusal
- ``late``: as ``error``, after an iteration
- ``schedule``: rank 0 finds another schedule in the checkpoint, as Megatron says it
- ``raise``: rank 0 raises; once it is gone the others lose their peer, often before the launcher
  looks
- ``leave``: as ``raise``, but rank 0 ends with exit code 0 and without a word
- ``hang``: never end; every rank leaves a child behind if it can, and its own id in FAKE_PIDS
- ``full``: the last rank writes into its run folder until the disk, a small one, is full
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAST = RANK == WORLD_SIZE - 1
BEHAVIOUR = os.environ.get("FAKE_RANK", "")


def loss_at(iteration: int) -> float:
    return 2.0 + 3.5 * math.exp(-iteration / 10)


def say(line: str) -> None:
    print(line, flush=True)


def say_iteration(iteration: int, total: int) -> None:
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    say(
        f" [{now}] iteration {iteration:8d}/{total:8d} | consumed samples: {16 * iteration:12d} |"
        f" elapsed time per iteration (ms): {50.0:.1f} | learning rate: {2e-3:.6E} |"
        f" global batch size: {16:5d} | lm loss: {loss_at(iteration):.6E} |"
        f" load_balancing_loss: {1.0:.6E} | loss scale: {1.0:.1f} | grad norm: {1.0:.3f} |"
        f" number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |"
    )


def say_evaluation(where: str, loss: float) -> None:
    line = f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: 1.0E+01 | "
    say("-" * len(line))
    say(line)
    say("-" * len(line))


class Events:
    """The scalars Megatron writes, in the file format torch's SummaryWriter writes."""

    def __init__(self, folder: str | None) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(folder) if LAST and folder else None

    def add(self, tag: str, loss: float, iteration: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is not None:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=loss)])
            self._writer.add_event(Event(wall_time=time.time(), step=iteration, summary=summary))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def fail(iteration: int, start: int) -> None:
    is_late = BEHAVIOUR == "late" and iteration == start + 2
    if (BEHAVIOUR in ("error", "refuse") or is_late) and LAST:
        known = "--num-experts: expected a multiple of 4, got 6. Change it."
        say(f"error: {os.environ.get('FAKE_ERROR', known)}")
        sys.exit(2 if BEHAVIOUR == "refuse" else 1)
    if BEHAVIOUR == "schedule" and RANK == 0:
        raise AssertionError("OptimizerParamScheduler: class input value 19 do not match")
    if BEHAVIOUR in ("raise", "leave") and iteration == 2:
        pids = Path(os.environ["FAKE_PIDS"])
        if RANK == 0:
            (pids / "0.tmp").write_text(str(os.getpid()))
            (pids / "0.tmp").rename(pids / "0")
            if BEHAVIOUR == "leave":
                sys.exit(0)
            raise ValueError("expert 3 has no weight")
        while not (pids / "0").exists() or Path("/proc", (pids / "0").read_text()).exists():
            time.sleep(0.001)
        raise RuntimeError("gloo: Connection closed by peer [127.0.0.1]:1234")


def fill_disk(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "state").open("wb", buffering=0) as file:
        for _ in range(64):
            file.write(bytes(2**20))
    raise AssertionError("not a small disk")


def hang() -> None:
    left_behind = subprocess.Popen(["sleep", "600"])
    pids = Path(os.environ["FAKE_PIDS"])
    (pids / f"{RANK}.tmp").write_text(f"{os.getpid()} {left_behind.pid}")
    (pids / f"{RANK}.tmp").rename(pids / f"{RANK}")
    time.sleep(600)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--train-iters", type=int, default=6)
    parser.add_argument("--eval-interval", type=int, default=2)
    parser.add_argument("--tensorboard-dir")
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--ckpt-step", type=int)
    return parser.parse_known_args()[0]


def main() -> None:
    args = parse()
    print("a warning that stderr gets", file=sys.stderr, flush=True)
    start = 0
    if args.load:
        tracked = (Path(args.load) / "latest_checkpointed_iteration.txt").read_text()
        start = args.ckpt_step or int(tracked)
    events = Events(args.tensorboard_dir)
    if RANK == 0:
        say("done with setup ...")
        say(f"arguments: {json.dumps(sys.argv[1:])}")
    for iteration in range(start + 1, args.train_iters + 1):
        if BEHAVIOUR == "hang" and iteration == 3:
            hang()
        if BEHAVIOUR == "full" and LAST:
            fill_disk(Path(args.save) / "iter_0000001")
        fail(iteration, start)
        events.add("lm loss", loss_at(iteration), iteration)
        if LAST:
            say_iteration(iteration, args.train_iters)
        if iteration % args.eval_interval == 0:
            events.add("lm loss validation", loss_at(iteration) + 0.25, iteration)
            if LAST:
                say_evaluation(f"iteration {iteration}", loss_at(iteration) + 0.25)
        time.sleep(0.01)
    for where, extra in (("validation", 0.3), ("test", 0.5)):
        loss = loss_at(args.train_iters) + extra
        events.add("lm loss validation", loss, args.train_iters)
        if LAST:
            say_evaluation(f"iteration {args.train_iters} on {where} set", loss)
    events.close()
    if RANK == 0 and args.save:
        model = {
            "optimizer": "FakeOptimizer",
            "format": "mxfp8",
            "parameters": 1_000_000,
            "quantized_parameters": 750_000,
            "rank0": {},
        }
        (Path(args.save).parent / "model.json").write_text(json.dumps(model))


if __name__ == "__main__":
    main()
