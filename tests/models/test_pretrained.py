"""Networks of transformers as bodies, from local weights."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.inference.model_folder import load_model
from kilter.inference.rows import read_rows
from kilter.models import build
from kilter.records.run_folder import Store

transformers = pytest.importorskip("transformers")
WORDS = ["[PAD]", "[UNK]", *["the", "patient", "is", "very", "ill", "and", "well", "today", "not"]]
SMALL_VIT = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 8, "num_hidden_layers": 1}
SMALL_VIT |= {"num_attention_heads": 2, "intermediate_size": 8}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny text encoder with its tokenizer file, as a hospital would have them on disk."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    lines = ["site,note,label"]
    for k in range(120):
        state = "ill" if k % 2 else "well"
        lines.append(f"{'ab'[k % 3 == 0]},the patient is {'very ' * (k % 3)}{state} today,{state}")
    (folder / "notes.csv").write_text("\n".join(lines) + "\n")
    return folder


def settings(saved: Path, **more: object) -> dict[str, object]:
    return {
        "data": str(saved / "notes.csv"), "client": "site", "text": "note", "task": "text",
        "tokenizer": str(saved / "tokenizer.json"),
        "prepare": "ids=yes,sequence=8", "model": f"hf:{saved}", "rounds": 4, "optimiser": "adam", "local": {"lr": 0.02},
        **more,
    }  # fmt: skip


def test_the_outputs_are_those_of_the_library(saved):
    net = build(f"hf:{saved}", (8,), 2).eval()
    x = torch.tensor([[3.0, 4, 5, 0, 0, 0, 0, 0]])  # tokens 2, 3, 4 and padding
    encoder = transformers.AutoModel.from_pretrained(saved).eval()
    states = encoder(input_ids=torch.tensor([[2, 3, 4]])).last_hidden_state
    assert torch.allclose(net.body(x), states.mean(1), atol=1e-5)
    assert net(x).shape == (1, 2)


def test_tokens_have_the_numbers_of_the_tokenizer(saved):
    dataset = Experiment.of(settings(saved)).split().dataset
    assert dataset.x[1].tolist() == [3, 4, 5, 6, 7, 10, 0, 0]  # the patient is very ill today


def test_a_local_text_model_is_tuned_with_adapters_and_predicts(saved, tmp_path):
    pytest.importorskip("peft")
    experiment = Experiment.of(settings(saved, lora="r=2,targets=query+value", rounds=6))
    method, fed = experiment.build()
    with fed:
        result = experiment.run(method, fed, Store(tmp_path / "run"))
    (tmp_path / "run" / "preparation.toml").write_text(experiment.split().dataset.preparation.text())
    assert result.summary.global_accuracy > 0.9
    trained = load_file(tmp_path / "run" / "model.safetensors")
    assert all("lora" in name or name.startswith("head.") for name in trained)  # nothing else is sent or stored
    model = load_model(tmp_path / "run")
    x = read_rows(model, saved / "notes.csv", str(saved / "tokenizer.json"))
    assert model.outputs(x).argmax(1)[:4].tolist() == [1, 0, 1, 0]


def test_an_image_encoder_is_a_body(tmp_path):
    config = transformers.ViTConfig(**SMALL_VIT)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    net = build(f"hf:{tmp_path / 'vit'}", (1, 8, 8), 10)
    assert net(torch.rand(3, 1, 8, 8)).shape == (3, 10)
    with pytest.raises(Mistake, match="cannot read rows of shape"):
        build(f"hf:{tmp_path / 'vit'}", (3, 9, 9), 10)


def test_what_cannot_be_loaded_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Mistake, match=r"cannot be loaded .*: give the folder of a saved model, or go online"):
        build(f"hf:{tmp_path / 'empty'}", (8,), 2)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Mistake, match=r"need the library transformers: `pip install 'kilter\[transformers\]'`"):
        build(f"hf:{tmp_path / 'empty'}", (8,), 2)


def test_without_a_network_only_the_cache_is_used(tmp_path, monkeypatch):
    import huggingface_hub

    from kilter.models import pretrained

    monkeypatch.setattr(pretrained, "_hub_is_reachable", lambda: False)
    with pytest.raises(Mistake, match="not in the local cache, and its hub cannot be reached"):
        build("hf:nobody/nothing", (8,), 2)
    transformers.ViTModel(transformers.ViTConfig(**SMALL_VIT)).save_pretrained(tmp_path)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert build("hf:somebody/vit", (1, 8, 8), 10)(torch.rand(3, 1, 8, 8)).shape == (3, 10)


def test_an_address_that_nobody_serves_is_not_reachable(monkeypatch):
    from kilter.models import pretrained

    monkeypatch.setattr(pretrained, "getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert not pretrained._hub_is_reachable()


def test_an_encoder_without_some_of_its_weights_is_refused(saved, tmp_path):
    weights = load_file(saved / "model.safetensors")
    for name, what in (
        ("pooler.dense.bias", ""),
        ("embeddings.word_embeddings.weight", "lacks 1 weights, such as emb"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
        some = {key: value for key, value in weights.items() if key != name}
        save_file(some, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(Mistake, match=what) if what else nullcontext():
            build(f"hf:{folder}", (8,), 2)
