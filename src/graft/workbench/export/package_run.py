"""Runs a package of AOTInductor in a process that has torch alone, and writes what it returned. Started by aoti.py.

python -c CODE PACKAGE CALLS RESULTS [MODULE …]     modules: those that register the ops it calls
"""

import importlib
import statistics
import sys
import time

import torch

package, calls, results, *modules = sys.argv[1:]
for name in modules:
    importlib.import_module(name)
started = time.perf_counter()
model = torch._inductor.aoti_load_package(package)
loaded = time.perf_counter() - started
given = torch.load(calls)
with torch.no_grad():
    returned = [model(*args) for args in given]
    times = []
    for _ in range(20):
        started = time.perf_counter()
        model(*given[0])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
torch.save({"returned": returned, "load_seconds": loaded, "call_seconds": statistics.median(times)}, results)
