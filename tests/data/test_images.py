"""Folders of images and volumes: what is read, what is skipped, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from kilter.data import TableOptions, load, split
from kilter.data.channel_moments import byte_moments, channel_sums, moments
from kilter.data.images import parse_size
from kilter.errors import Mistake


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KILTER_CACHE", str(tmp_path / "cache"))


def picture(path: Path, value: int = 0, mode: str = "L", size: tuple[int, int] = (8, 8)) -> Path:
    """An image of one colour; `size` is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = (value, value, 0) if mode == "RGB" else (value, value, 0, 255) if mode == "RGBA" else value
    Image.new(mode, size, colour).save(path)
    return path


def gallery(root: Path, clients: tuple[str, ...] = (), count: int = 5, **options) -> Path:
    for client in clients or ("",):
        for label, value in (("cat", 51), ("dog", 204)):
            for at in range(count):
                picture(root / client / label / f"{at}.png", value, **options)
    return root


def test_a_folder_for_each_class(tmp_path):
    data = load(gallery(tmp_path / "g"))
    assert data.classes == ("cat", "dog")
    assert data.x.shape == (10, 1, 8, 8)
    assert data.x.dtype == torch.float32
    assert data.x[data.y == 0].unique().tolist() == pytest.approx([0.2])
    assert data.groups is None
    assert len(data.test) == 2


def test_a_folder_for_each_client_and_class_and_natural_clients(tmp_path):
    data = load(gallery(tmp_path / "Köln", ("Süd", "nord")))
    assert data.group_names == ("Süd", "nord")
    assert data.client_source == "folders"
    assert set(split(data, "natural", 0).clients) == {"S-d", "nord"}  # names of clients are ASCII


def test_train_and_test_folders_at_either_level(tmp_path):
    for part in ("train", "test"):
        gallery(tmp_path / "outer" / part, ("a", "b"), 2 if part == "test" else 4)
        for client in ("a", "b"):
            gallery(tmp_path / "inner" / client / part, (), 2 if part == "test" else 4)
    outer, inner = load(tmp_path / "outer"), load(tmp_path / "inner")
    assert (len(outer.train), len(outer.test)) == (len(inner.train), len(inner.test)) == (16, 8)
    assert outer.group_names == inner.group_names == ("a", "b")


def test_mixed_sizes_and_modes_become_one(tmp_path):
    root = gallery(tmp_path / "g", mode="L", size=(8, 8))
    picture(root / "cat" / "x.jpg", 100, "RGB", (20, 30))
    picture(root / "cat" / "y.png", 100, "RGBA", (9, 9))
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(root / "dog" / "z.png")
    picture(root / "dog" / "p.gif", 3, "P")
    data = load(root)
    assert data.x.shape == (14, 3, 64, 64)
    assert len(data.mean) == 3
    said = ("transparent", "16 bits", "--image-mode", "--image-size")
    assert all(word in note for word, note in zip(said, data.notes, strict=True))
    grey = load(root, table=TableOptions(image_size="4x6", image_mode="grey"))
    assert grey.x.shape == (14, 1, 4, 6)
    deep = grey.x[[at for at in range(14) if abs(float(grey.x[at].mean()) - 40_000 / 65535) < 0.01]]
    assert len(deep) == 1


def test_a_damaged_image_is_named_skipped_and_counted(tmp_path):
    root = gallery(tmp_path / "g")
    whole = picture(root / "cat" / "good.jpg", 9).read_bytes()
    (root / "cat" / "bad.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "dog" / "none.png").write_bytes(b"not an image")
    data = load(root)
    assert len(data.y) == 11
    (note,) = [note for note in data.notes if "Skipped" in note]
    assert note.startswith("Skipped 2 of 13 images")
    assert "bad.jpg" in note
    assert "none.png" in note
    assert load(root).notes == data.notes  # also from the cache


def test_skipped_images_are_in_the_summary_of_a_run(tmp_path):
    from kilter.experiment import Experiment
    from kilter.records.run_folder import Store, read_summary

    root = gallery(tmp_path / "g", ("north", "St. Mary's"))
    for name in ("0.png", "1.png"):
        (root / "St. Mary's" / "cat" / name).write_bytes(b"not an image")
    for partition, where in (("auto", "St.-Mary-s"), ("iid", "server")):
        run = Experiment.of({"data": str(root), "rounds": 1, "partition": partition, "clients": 2, "model": "linear"})
        method, fed = run.build()
        with fed:
            run.run(method, fed, Store(tmp_path / partition))
        (notice,) = read_summary(tmp_path / partition).notices
        assert (notice.what, notice.count) == ("an image could not be read and was skipped", 2)
        assert notice.nodes == [where]


def test_the_cache_is_used_until_a_file_changes(tmp_path, monkeypatch):
    root = gallery(tmp_path / "g")
    first = load(root)
    monkeypatch.setattr("kilter.data.images.decode", lambda *_: pytest.fail("decoded again"))
    assert torch.equal(load(root).x, first.x)
    monkeypatch.undo()
    monkeypatch.setenv("KILTER_CACHE", str(tmp_path / "cache"))
    picture(root / "cat" / "0.png", 250)
    os.utime(root / "cat" / "0.png", (1, 1))
    assert load(root).x.max() > 0.9


def test_images_that_do_not_fit_on_the_disk_are_refused_before_decoding(tmp_path, monkeypatch):
    root = gallery(tmp_path / "g")  # ten images of 64 bytes
    monkeypatch.setattr("kilter.data.images.decode", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=639))
    with pytest.raises(
        Mistake, match=r"take 6\.4e-07 GB .* has 6\.39e-07 GB free: set KILTER_CACHE to a folder on a larger disk"
    ):
        load(root)
    monkeypatch.undo()
    monkeypatch.setenv("KILTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=640))
    assert len(load(root).y) == 10


def test_large_sets_stay_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("kilter.data.datasets.SMALL", 100)
    data = load(gallery(tmp_path / "g", mode="RGB"))
    assert data.x.dtype == torch.uint8
    part = split(data, "iid", 2).clients["c00"].train
    assert part.batch()["x"].max() == pytest.approx(0.8)


def test_moments_of_large_images_are_counted_as_bytes():
    x = torch.randint(0, 256, (6, 3, 10, 12), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    rows = np.arange(1, 6)
    for counted, plain in zip(byte_moments(x, rows), moments(x, rows), strict=True):
        assert counted == pytest.approx(plain, rel=1e-5)
    sums = np.stack([channel_sums(image) for image in x.numpy()])
    for summed, counted in zip(moments(x, rows, sums), byte_moments(x, rows), strict=True):
        assert summed == pytest.approx(counted, rel=1e-12)


def test_sums_of_large_images_are_kept_with_the_cache(tmp_path):
    for at in range(6):
        picture(tmp_path / "g" / "ab"[at % 2] / f"{at}.png", 40 * at, "RGB", (80, 80))
    (tmp_path / "g" / "a" / "bad.png").write_bytes(b"not an image")
    for data in (load(tmp_path / "g"), load(tmp_path / "g")):
        assert data.sums is not None
        assert data.sums.shape == (6, 3, 2)
        expected = byte_moments((data.x * 255).round().to(torch.uint8), data.train.numpy())
        assert (data.mean, data.std) == (pytest.approx(expected[0]), pytest.approx(expected[1]))


def test_a_table_of_paths_and_labels(tmp_path):
    gallery(tmp_path / "g", ("x",))
    lines = [f"g/x/{label}/{at}.png,{label},{'ab'[at % 2]}" for label in ("cat", "dog") for at in range(5)]
    (tmp_path / "list.csv").write_text("path,label,client\n" + "\n".join(lines))
    data = load(tmp_path / "list.csv")
    assert data.x.shape == (10, 1, 8, 8)
    assert data.group_names == ("a", "b")
    (tmp_path / "more.csv").write_text("path,label,age\ng/x/cat/0.png,cat,7\ng/x/dog/0.png,dog,8\n")
    with pytest.raises(Mistake, match="columns that are not used: leave out 'age'"):
        load(tmp_path / "more.csv")
    (tmp_path / "gone.csv").write_text("path,label\ng/x/cat/77.png,cat\n")
    with pytest.raises(Mistake, match=r"images that do not exist: .*77.png"):
        load(tmp_path / "gone.csv")


def test_volumes_have_slices_as_channels(tmp_path):
    rng = np.random.default_rng(0)
    for label in ("ill", "well"):
        (tmp_path / "v" / label).mkdir(parents=True)
        for at in range(4):
            np.save(tmp_path / "v" / label / f"{at}.npy", rng.normal(100, 5, (6, 8, 8)))
    data = load(tmp_path / "v")
    assert data.x.shape == (8, 6, 8, 8)
    assert data.x.mean(dim=(1, 2, 3)).tolist() == pytest.approx([0] * 8, abs=1e-5)
    np.save(tmp_path / "v" / "ill" / "9.npy", rng.normal(size=(2, 8, 8)))
    with pytest.raises(Mistake, match="use one shape for all"):
        load(tmp_path / "v")


def test_nifti_volumes_have_slices_first(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    for label, value in (("ill", 3), ("well", 4)):
        (tmp_path / "v" / label).mkdir(parents=True)
        for at in range(3):
            voxels = np.random.default_rng(at).normal(value, 1, (8, 10, 5)).astype(np.float32)
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / "v" / label / f"{at}.nii.gz")
    assert load(tmp_path / "v").x.shape == (6, 5, 8, 10)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["a/b/c/d.png"], "is in 3 folders"),
        (["cat/0.png", "site/cat/0.png"], "has a folder for its client and .* has none"),
        (["train/cat/0.png", "train/dog/0.png"], "train and test, or neither"),
        (["train/cat/0.png", "test/dog/0.png"], "the class 'dog', which no training image has"),
    ],
)
def test_bad_folders_are_refused_in_one_sentence(files, message, tmp_path):
    for file in files:
        picture(tmp_path / "g" / file)
    with pytest.raises(Mistake, match=message) as caught:
        load(tmp_path / "g")
    assert "\n" not in str(caught.value)


def test_other_bad_folders(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(Mistake, match=r"no data.npz"):
        load(tmp_path / "empty")
    (tmp_path / "broken" / "cat").mkdir(parents=True)
    (tmp_path / "broken" / "cat" / "a.png").write_bytes(b"")
    with pytest.raises(Mistake, match="None of the 1 images"):
        load(tmp_path / "broken")
    with pytest.raises(Mistake, match="--image-size takes"):
        parse_size("big")
    gallery(tmp_path / "g")
    with pytest.raises(Mistake, match="class 'cat' is not among the classes 'dog'"):
        load(tmp_path / "g", classes=["dog"])


def resident(array: np.ndarray) -> int:
    """How many kilobytes of a mapped array are in the memory of this process."""
    address, kilobytes, inside = array.ctypes.data, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            inside = low <= address < high
        elif inside and line.startswith("Rss:"):
            kilobytes += int(line.split()[1])
    return kilobytes


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux counts this")
def test_reading_a_mapped_file_leaves_nothing_in_memory(tmp_path):
    from kilter.data.mapped import open_mapped, release

    np.save(tmp_path / "x.npy", np.arange(2**20))
    array = open_mapped(tmp_path / "x.npy")
    x = torch.from_numpy(array)
    total = int(x.sum())
    assert resident(array) > 4000
    release(x)
    assert resident(array) < 1000
    assert int(x.sum()) == total == 2**19 * (2**20 - 1)
    own = torch.arange(10)
    release(own)  # not mapped: stays as it is
    assert own.tolist() == list(range(10))


def test_photos_are_turned_as_their_tag_says(tmp_path):
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8] = 200  # light on the left; turned clockwise, on top
    tag = Image.Exif()
    tag[0x0112] = 6
    for label in ("cat", "dog"):
        for k in range(4):
            (tmp_path / "g" / label).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / "g" / label / f"{k}.jpg", exif=tag)
    x = load(tmp_path / "g").x
    assert x.shape == (8, 3, 16, 8)
    assert x[:, :, :7].min() > 0.7 > 0.1 > x[:, :, 9:].max()


def test_what_decoding_leaves_out_is_said(tmp_path):
    root = gallery(tmp_path / "g")
    pages = [Image.new("L", (8, 8), k) for k in range(3)]
    pages[0].save(root / "cat" / "pages.tif", save_all=True, append_images=pages[1:])
    (root / "cat" / "scan.dcm").write_text("x")
    notes = load(root).notes
    assert any("1 images have several frames" in note for note in notes)
    assert any(note.endswith("1 .dcm.") for note in notes)


def test_grey_images_with_transparency_stay_grey(tmp_path):
    for label in ("cat", "dog"):
        for k in range(3):
            (tmp_path / "g" / label).mkdir(parents=True, exist_ok=True)
            Image.new("LA", (8, 8), (k, 255)).save(tmp_path / "g" / label / f"{k}.png")
    data = load(tmp_path / "g")
    assert data.x.shape == (6, 1, 8, 8)
    assert "transparent" in data.notes[0]


def test_folders_that_cannot_be_meant_are_refused(tmp_path):
    for part in ("train", "test", "val"):
        gallery(tmp_path / "parts" / part)
    with pytest.raises(Mistake, match=r"parts/val' is a folder of validation images"):
        load(tmp_path / "parts")
    picture(tmp_path / "flat" / "a.png")
    with pytest.raises(Mistake, match="in no folder of a class"):
        load(tmp_path / "flat")
    gallery(tmp_path / "both")
    (tmp_path / "both" / "t.csv").write_text("a,label\n1,0\n2,1\n")
    with pytest.raises(Mistake, match="holds tables, and images in folders"):
        load(tmp_path / "both")
    for part in ("train", "test"):
        gallery(tmp_path / "own" / part)
    with pytest.raises(Mistake, match="leave out --test-size"):
        load(tmp_path / "own", table=TableOptions(test_size=0.5))
