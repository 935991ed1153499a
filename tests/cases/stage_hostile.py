"""Programs that do what a tool around them must bear: print, exit, raise, take what cannot be copied."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch

print("while it is imported")
ONE = [(torch.ones(2),)]


def prints(x):
    print("while it is called")
    os.write(1, b"past Python's own output\n")
    return x * 2


def prints_inputs():
    print("while inputs are made")
    return ONE


def exits(x):
    sys.exit(0)


exits_inputs = ONE


def exits_for_inputs(x):
    return x


def exits_for_inputs_inputs():
    sys.exit(0)


def keyword_only(x, *, k):
    return x * k


keyword_only_inputs = ONE


def takes_lock(x, lock):
    return x + 1


takes_lock_inputs = [(torch.ones(2), threading.Lock())]


def takes_result(x):
    return x * 2


takes_result_inputs = [(torch.ones(2, requires_grad=True) * 2,)]


def needs_gradients(x):
    (x * 2).sum().backward()
    return x


needs_gradients_inputs = [(torch.ones(2, requires_grad=True),)]


def raises_late(x, k):
    if k == 2:
        raise ValueError("the second call")
    return x * 2


raises_late_inputs = [(torch.ones(2), 1), (torch.ones(2), 2)]


def misfits(x):
    y = x + 1
    return y @ torch.ones(3, 3)


misfits_inputs = ONE


def helper(x):
    return x * 3 + 1


def calls_helper(x):
    y = helper(x)
    return helper(y) - 1


calls_helper_inputs = ONE
number = 3


def leaves(x):
    y = x + 1
    os._exit(0)
    return y


def leaves_inputs():
    return [(torch.ones(2),)]


def reads_nothing(x):
    y = x * 2
    os.kill(os.getpid(), signal.SIGSEGV)
    return y + 1


def reads_nothing_inputs():
    return [(torch.ones(2),)]
