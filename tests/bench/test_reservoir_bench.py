"""The parts of the reservoir benchmark: what it compares with is right, and the bound is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.bench.peers import models
from penstock.bench.peers.bound import PIECE_BYTES, Bound, Disk, EagerParts
from penstock.bench.peers.children import Child
from penstock.bench.peers.offload_loop import OffloadLoop
from penstock.runtime.measure.disks import disk_directories
from penstock.tests.shown_elsewhere import slow_but

LR = 1e-3


def test_the_loop_by_hand_trains_like_eager_and_leaves_no_files(tmp_path: Path) -> None:
    batch = models.batch(4, length=16, vocabulary=64)
    eager = EagerParts(models.gpt2(2, 64, vocabulary=64), 2, LR)
    with OffloadLoop(models.gpt2(2, 64, vocabulary=64), tmp_path, 2, LR) as loop:
        assert len(list(tmp_path.iterdir())) == 2
        assert all(p.numel() == 0 for p in loop.model.transformer.h.parameters())
        for _ in range(3):
            assert loop.step(batch) == pytest.approx(eager.step(batch), rel=1e-6)
    assert list(tmp_path.iterdir()) == []
    assert len(eager.compute_s) == len(eager.optimizer_s) == 3
    assert min(eager.compute_s) > 0


@pytest.mark.parametrize(
    "total_bytes", slow_but([1, PIECE_BYTES + 5000], [1, 4096, PIECE_BYTES + 5000, 5 * PIECE_BYTES])
)
def test_the_disk_moves_a_steps_bytes_in_whole_pages(tmp_path: Path, total_bytes: int) -> None:
    places = disk_directories([tmp_path, Path.cwd()])
    if not places:
        pytest.skip("neither the temporary folder nor this one lies on a disk with O_DIRECT")
    with Disk(places[0], total_bytes, total_bytes // 2, file_bytes=2 * PIECE_BYTES) as disk:
        before = disk.folder.read_bytes, disk.folder.written_bytes
        disk.read_then_write()
        assert min(disk.read_s + disk.write_s) > 0
        disk.read_while_writing()
        moved = [after - b for after, b in zip((disk.folder.read_bytes, disk.folder.written_bytes), before)]
    for found, wanted in zip(moved, (total_bytes, total_bytes // 2)):
        assert 2 * wanted <= found < 2 * (wanted + 4096)


def test_the_bound_is_the_longest_part_of_what_runs_side_by_side() -> None:
    apart = Bound(compute_s=3.0, optimizer_s=1.0, disk_s=3.5, cores_shared=False)
    assert (apart.seconds, apart.longest_part) == (3.5, "disk")
    shared = Bound(compute_s=3.0, optimizer_s=1.0, disk_s=3.5, cores_shared=True)
    assert (shared.seconds, shared.longest_part) == (4.0, "compute and optimizer")
    assert Bound(1.0, 2.0, 0.5, cores_shared=False).longest_part == "optimizer"


def test_a_peer_that_fails_says_why(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text("raise SystemExit('no such thing here')")
    with pytest.raises(RuntimeError, match="no such thing here"):
        Child(script, {}, threads=1)


def test_a_peer_steps_and_libraries_may_print(tmp_path: Path) -> None:
    peers = Path(models.__file__).parent
    script = tmp_path / "peer.py"
    script.write_text(f"""import sys
sys.path.insert(0, {str(peers)!r})
import children

def prepare(settings):
    print("a library's banner")
    losses = iter(settings["losses"])
    def step():
        print("and its progress")
        return next(losses)
    return step, {{"version": "1"}}

children.serve(prepare)
""")
    with Child(script, {"losses": [3.5, 2.5]}, threads=1) as child:
        assert child.facts == {"version": "1"}
        assert [child.step(), child.step()] == [3.5, 2.5]
        assert child.peak_bytes > 2**20


@pytest.mark.slow
def test_fsdp_with_cpu_offload_trains_like_eager() -> None:
    settings = {"layers": 2, "width": 64, "tied": True, "vocabulary": 64, "batch": 4, "micro_batches": 2, "lr": LR}
    batch = models.batch(4, vocabulary=64)
    eager = EagerParts(models.gpt2(2, 64, vocabulary=64), 2, LR)
    script = Path(models.__file__).parent / "fsdp_offload.py"
    with Child(script, {**settings, "checkpoint": True}, threads=1) as child:
        for _ in range(3):
            assert child.step() == pytest.approx(eager.step(batch), rel=1e-5)
