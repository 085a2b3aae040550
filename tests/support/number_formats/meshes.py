"""Meshes of ranks without processes: each rank a thread, a reduction where all of them meet."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

WAIT_S = 60


def coordinates(partition):
    """Return the coordinate of every rank of the mesh that cuts a weight."""
    names = [axis.name for axis in partition.axes]
    places = itertools.product(*(range(axis.parts) for axis in partition.axes))
    return [dict(zip(names, place, strict=True)) for place in places]


def part_of(weight, partition, coordinate):
    """Return what one rank has of a weight [E, R, C], a view."""
    bounds = partition.bounds(coordinate)
    spans = (bounds[dimension] for dimension in ("experts", "rows", "columns"))
    return weight[tuple(slice(span.start, span.stop) for span in spans)]


def on_each_rank(partition, function):
    """Call ``function(coordinate, reduce_max)`` on all ranks at once; return what each returned.

    One of them runs at a time. A rank that reduces over another axis than the others, or less
    often, fails all of them.
    """
    ranks = coordinates(partition)
    names = [axis.name for axis in partition.axes]
    given: dict[tuple[int, ...], tuple[str, torch.Tensor]] = {}
    turn, meet = threading.Lock(), threading.Barrier(len(ranks))

    def wait():
        turn.release()
        try:
            meet.wait(WAIT_S)
        finally:
            turn.acquire()

    def run(coordinate):
        own = tuple(coordinate.values())

        def reduce_max(values, axis):
            given[own] = axis, values.clone()
            wait()
            assert {called for called, _ in given.values()} == {axis}, "ranks reduce unlike axes"
            along = names.index(axis)
            peers = [
                others
                for place, (_, others) in given.items()
                if place[:along] + place[along + 1 :] == own[:along] + own[along + 1 :]
            ]
            values.copy_(torch.stack(peers).amax(0))
            wait()

        try:
            with turn:
                return function(coordinate, reduce_max)
        except BaseException:
            meet.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(run, ranks))
