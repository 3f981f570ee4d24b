"""Net, 0.0 M parameters, on cpu: device 1 of 2 (cpu1, root complex 0)
passes   drop-masks, chunk-loss, interleave-forwards, coarsen, partition-balanced{stages=2}, map-round-robin,
         schedule-pipeline, insert-remat, insert-fetch, insert-optimizer
plan     d011e2, micro-batches 2 x 4, fp32; stages here: stage1
predict  1.10 ms a step; cpu1 3.02 KiB of 61.0 MiB, dram0 0.00 B of 244 MiB; bound by cpu0 compute, busy 58%
"""

import torch
import torch.nn.functional as F
from torch import nn

from penstock.runtime.modules import Scope, Stage


class Stage1(Stage):  # head: 68 parameters, 272 B
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(in_features=16, out_features=4, bias=True)      # 68 parameters, 272 B

    def forward(self, hidden, y, items):                                      # f32[4, 16], i64[4], f32[1]
        # Net
        items = items[0]                                                      # f32[]
        quotient = F.cross_entropy(self.head(hidden), y, reduction="sum") / items  # f32[]
        return (quotient,)                                                    # cross_entropy


STAGES = {"stage1": Stage1}


def step(rt, batch):
    # forward, stage 1
    w1 = rt.resident("stage1.weights")                                                    # weights 1.00 KiB
    relu_1_m0 = rt.recv("stage0.relu_1", src=0, tag="relu_1.m0")                          # f32[4, 16] 256 B  recv
    y_m0 = rt.load(batch, "y", micro_batch=0)                                             # i64[4] 32.0 B
    items_m0 = rt.load(batch, "items", micro_batch=0)                                     # f32[1] 4.00 B
    cross_entropy_m0, kept1_m0 = rt.forward("stage1", w1, relu_1_m0, y_m0, items_m0, micro_batch=0)  # f32[] 4.00 B; kept 68.0 B  compute
    relu_1_m1 = rt.recv("stage0.relu_1", src=0, tag="relu_1.m1")                          # f32[4, 16] 256 B  recv
    y_m1 = rt.load(batch, "y", micro_batch=1)                                             # i64[4] 32.0 B
    items_m1 = rt.load(batch, "items", micro_batch=1)                                     # f32[1] 4.00 B
    cross_entropy_m1, kept1_m1 = rt.forward("stage1", w1, relu_1_m1, y_m1, items_m1, micro_batch=1)  # f32[] 4.00 B; kept 68.0 B  compute
    # backward, stage 1
    d_relu_1_m0_s1, g1_m0 = rt.backward("stage1", w1, kept1_m0, [relu_1_m0, y_m0, items_m0], [0.5], None, micro_batch=0)  # f32[4, 16] 256 B; grads 272 B  compute
    rt.free(relu_1_m0, y_m0, items_m0, kept1_m0)
    rt.send(d_relu_1_m0_s1, dst=0, tag="grad relu_1.m0")                                  # send
    rt.free(d_relu_1_m0_s1)
    d_relu_1_m1_s1, g1_m1 = rt.backward("stage1", w1, kept1_m1, [relu_1_m1, y_m1, items_m1], [0.5], g1_m0, micro_batch=1)  # f32[4, 16] 256 B; grads 272 B  compute
    rt.free(relu_1_m1, y_m1, items_m1, kept1_m1)
    rt.send(d_relu_1_m1_s1, dst=0, tag="grad relu_1.m1")                                  # send
    rt.free(d_relu_1_m1_s1)
    # update
    rt.step("stage1", g1_m1)                                                              # compute
    rt.free(g1_m1)
    return {"loss": [cross_entropy_m0, cross_entropy_m1]}


def evaluate(rt, batch):
    # evaluate, stage 1
    w1 = rt.resident("stage1.weights")                                                    # weights 1.00 KiB
    relu_1_m0 = rt.recv("stage0.relu_1", src=0, tag="relu_1.m0")                          # f32[4, 16] 256 B  recv
    y_m0 = rt.load(batch, "y", micro_batch=0)                                             # i64[4] 32.0 B
    items_m0 = rt.load(batch, "items", micro_batch=0)                                     # f32[1] 4.00 B
    cross_entropy_m0, = rt.evaluate("stage1", w1, relu_1_m0, y_m0, items_m0, micro_batch=0)  # f32[] 4.00 B  compute
    rt.free(relu_1_m0, y_m0, items_m0)
    relu_1_m1 = rt.recv("stage0.relu_1", src=0, tag="relu_1.m1")                          # f32[4, 16] 256 B  recv
    y_m1 = rt.load(batch, "y", micro_batch=1)                                             # i64[4] 32.0 B
    items_m1 = rt.load(batch, "items", micro_batch=1)                                     # f32[1] 4.00 B
    cross_entropy_m1, = rt.evaluate("stage1", w1, relu_1_m1, y_m1, items_m1, micro_batch=1)  # f32[] 4.00 B  compute
    rt.free(relu_1_m1, y_m1, items_m1)
    return {"loss": [cross_entropy_m0, cross_entropy_m1]}
