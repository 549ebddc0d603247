"""Run the jobs of a conversion in threads, with bounded memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeAlias

import torch
from tqdm import tqdm

from moe_nvfp4.quantize.jobs import Job

IN_FLIGHT = 500_000_000  # bytes that all workers together may hold
Work: TypeAlias = Iterable[tuple[Job, Callable[[], int]]]  # jobs, each with what does it and returns a number


def default_workers(device: torch.device) -> int:
    """Few threads, since more wait for the interpreter: on 16 cores, 16 threads convert 105 MB/s, and 4 threads 117.

    On a GPU jobs are larger: 2, 4, 6 and 8 threads beside an H200 convert 1182, 2304, 2434 and 2753 MB/s.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8 if device.type == "cuda" else 4)


def run_jobs(work: Work, device: torch.device, workers: int, bar: tqdm | None = None) -> int:
    """Do all `work` in `workers` threads, with at most IN_FLIGHT bytes in memory. Returns the sum of what it returned.

    device  where the jobs quantize
    bar     is told the source bytes of each job that is done

    The first error stops everything and is raised.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a matrix per worker is faster than all threads on one matrix
    try:
        with ThreadPoolExecutor(workers, initializer=_own_stream, initargs=(device,)) as pool:
            return _feed(pool, workers, work, bar)
    finally:
        torch.set_num_threads(threads)


def _own_stream(device: torch.device) -> None:
    """Give a worker its own stream on a GPU, so that it reads and writes while another computes."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


def _feed(pool: ThreadPoolExecutor, workers: int, work: Work, bar: tqdm | None) -> int:
    """Give work to the pool as memory allows."""
    running: dict[Future, Job] = {}
    memory = total = 0
    stop = threading.Event()

    def one(do: Callable[[], int]) -> int:
        return 0 if stop.is_set() else do()

    def collect() -> None:
        nonlocal memory, total
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            job = running.pop(future)
            memory -= job.memory
            total += future.result()
            if bar is not None:
                bar.update(job.size)

    try:
        for job, do in work:
            while running and (memory + job.memory > IN_FLIGHT or len(running) >= 4 * workers):
                collect()
            running[pool.submit(one, do)] = job
            memory += job.memory
        while running:
            collect()
    finally:
        stop.set()
    return total
