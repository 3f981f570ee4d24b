"""Net, 0.0 M parameters, on cpu: device 0 of 2 (cpu0, root complex 0)
passes   drop-masks, chunk-loss, interleave-forwards, coarsen, partition-balanced{stages=2}, map-round-robin,
         schedule-pipeline, insert-remat, insert-fetch, insert-optimizer
plan     d011e2, micro-batches 2 x 4, fp32; stages here: stage0
predict  1.10 ms a step; cpu0 10.2 KiB of 61.0 MiB, dram0 0.00 B of 244 MiB; bound by cpu0 compute, busy 58%
"""

import torch
from torch import nn

from penstock.runtime.modules import Scope, Stage


class Stage0(Stage):  # first to second: 416 parameters, 1.62 KiB
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(in_features=8, out_features=16, bias=True)     # 144 parameters, 576 B
        self.second = nn.Linear(in_features=16, out_features=16, bias=True)   # 272 parameters, 1.06 KiB

    def forward(self, x):                                                     # f32[4, 8]
        # Net
        hidden = torch.relu(self.second(torch.relu(self.first(x))))           # f32[4, 16]
        return (hidden,)                                                      # relu_1


STAGES = {"stage0": Stage0}


def step(rt, batch):
    # forward, stage 0
    w0 = rt.resident("stage0.weights")                                                    # weights 2.50 KiB
    x_m0 = rt.load(batch, "x", micro_batch=0)                                             # f32[4, 8] 128 B
    relu_1_m0, kept0_m0 = rt.forward("stage0", w0, x_m0, micro_batch=0)                   # f32[4, 16] 256 B; kept 512 B  compute
    rt.send(relu_1_m0, dst=1, tag="relu_1.m0")                                            # send
    rt.free(relu_1_m0)
    x_m1 = rt.load(batch, "x", micro_batch=1)                                             # f32[4, 8] 128 B
    relu_1_m1, kept0_m1 = rt.forward("stage0", w0, x_m1, micro_batch=1)                   # f32[4, 16] 256 B; kept 512 B  compute
    rt.send(relu_1_m1, dst=1, tag="relu_1.m1")                                            # send
    rt.free(relu_1_m1)
    # backward, stage 0
    d_relu_1_m0 = rt.recv("stage0.relu_1", src=1, tag="grad relu_1.m0")                   # f32[4, 16] 256 B  recv
    g0_m0, = rt.backward("stage0", w0, kept0_m0, [x_m0], [d_relu_1_m0], None, micro_batch=0)  # grads 1.62 KiB  compute
    rt.free(x_m0, kept0_m0, d_relu_1_m0)
    d_relu_1_m1 = rt.recv("stage0.relu_1", src=1, tag="grad relu_1.m1")                   # f32[4, 16] 256 B  recv
    g0_m1, = rt.backward("stage0", w0, kept0_m1, [x_m1], [d_relu_1_m1], g0_m0, micro_batch=1)  # grads 1.62 KiB  compute
    rt.free(x_m1, kept0_m1, d_relu_1_m1)
    # update
    rt.step("stage0", g0_m1)                                                              # compute
    rt.free(g0_m1)
    return {}


def evaluate(rt, batch):
    # evaluate, stage 0
    w0 = rt.resident("stage0.weights")                                                    # weights 2.50 KiB
    x_m0 = rt.load(batch, "x", micro_batch=0)                                             # f32[4, 8] 128 B
    relu_1_m0, = rt.evaluate("stage0", w0, x_m0, micro_batch=0)                           # f32[4, 16] 256 B  compute
    rt.free(x_m0)
    rt.send(relu_1_m0, dst=1, tag="relu_1.m0")                                            # send
    rt.free(relu_1_m0)
    x_m1 = rt.load(batch, "x", micro_batch=1)                                             # f32[4, 8] 128 B
    relu_1_m1, = rt.evaluate("stage0", w0, x_m1, micro_batch=1)                           # f32[4, 16] 256 B  compute
    rt.free(x_m1)
    rt.send(relu_1_m1, dst=1, tag="relu_1.m1")                                            # send
    rt.free(relu_1_m1)
    return {}
