"""Fine-tune a small text model at three clinics with low-rank adapters (LoRA).

    pip install 'kilter[transformers,lora,text]'
    python examples/fine_tune_text.py FOLDER

The script trains a tokenizer and pre-trains a small BERT on texts without labels (it learns to fill in masked words). Three
clinics with few labelled texts then fine-tune it, and are tested on complaints that no label is about. `--lora` trains and sends
adapters and the head only. The table compares this with the same network without pre-training, and with fine-tuning all weights.
Every run is a command that you can type.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForMaskedLM, BertModel
from transformers.utils import logging

SEVERE = "chest-pain dyspnoea syncope high-fever stroke bleeding sepsis seizure shock cyanosis trauma embolism"
MILD = "cough sneezing sore-throat fatigue itching hiccups sunburn insomnia backache sprain acne cramps"
COMPLAINTS = {"yes": SEVERE.split(), "no": MILD.split()}
STYLES = {"north": "patient reports {}", "south": "pt c/o {}", "west": "{} since yesterday"}
LENGTH, TEXTS, LABELLED, TESTED = 12, 3000, 10, 60  # tokens; texts without labels; texts of each clinic


def text(rng: np.random.Generator, admitted: str, clinic: str, words: slice = slice(None)) -> str:
    return STYLES[clinic].format(" and ".join(rng.choice(COMPLAINTS[admitted][words], 3, replace=False)))


def write_notes(folder: Path) -> None:
    """notes.csv and test.csv: texts with labels, by clinic; each names another half of the complaints."""
    rng = np.random.default_rng(1)
    for name, rows, words in (("notes", LABELLED, slice(6)), ("test", TESTED, slice(6, None))):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["clinic", "note", "admitted"])
            for row in range(rows * len(STYLES)):
                clinic, admitted = list(STYLES)[row % 3], ("yes", "no")[row // 3 % 2]
                writer.writerow([clinic, text(rng, admitted, clinic, words), admitted])


def pretrain(folder: Path) -> None:
    """Write tokenizer.json, and the encoders `untrained` and `encoder`, before and after filling in masked words."""
    logging.disable_progress_bar()
    rng = np.random.default_rng(0)
    texts = [text(rng, ("yes", "no")[k % 2], list(STYLES)[k % 3]) for k in range(TEXTS)]
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]", "[MASK]"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=LENGTH)
    tokenizer.enable_truncation(LENGTH)
    ids = torch.tensor([e.ids for e in tokenizer.encode_batch(texts)])
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for more
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder / "untrained")
    model = BertForMaskedLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(400):
        batch = ids[torch.randint(len(ids), (64,))]
        masked = (torch.rand(batch.shape) < 0.3) & (batch > 0)
        inputs, labels = batch.masked_fill(masked, 2), batch.masked_fill(~masked, -100)
        loss = model(input_ids=inputs, attention_mask=(batch > 0).long(), labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 100 == 0:
            print(f"pre-training, step {step}: loss {loss.item():.2f}", flush=True)
    model.bert.save_pretrained(folder / "encoder")


def kilter(folder: Path, *words: str) -> None:
    print("$ kilter", *words, flush=True)
    subprocess.run([sys.executable, "-m", "kilter", *words, "--quiet"], cwd=folder, check=True)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "fine-tuning-text")
    folder.mkdir(parents=True, exist_ok=True)
    write_notes(folder)
    pretrain(folder)
    lora = ("--lora", "r=4,targets=query+value", "--lr", "0.01")
    runs = {
        "LoRA, without pre-training": ("hf:untrained", *lora),
        "LoRA, pre-trained": ("hf:encoder", *lora),
        "all weights, pre-trained": ("hf:encoder", "--lr", "0.001"),
    }
    data = ["--data", "notes.csv", "--test-file", "test.csv", "--client", "clinic", "--label", "admitted"]
    data += [
        "--task",
        "text",
        "--text",
        "note",
        "--tokenizer",
        "tokenizer.json",
        "--prepare",
        f"ids=yes,sequence={LENGTH}",
    ]
    plan = ["--optimiser", "adam", "--batch", "4", "--epochs", "5", "--rounds", "6"]
    lines = ["| training | accuracy on new texts | sent by the clinics |", "|---|---|---|"]
    for k, (name, (model, *options)) in enumerate(runs.items()):
        out = f"runs/{k}"
        kilter(folder, "run", *data, *plan, "--model", model, *options, "--out", out)
        summary = json.loads((folder / out / "summary.json").read_text())
        lines.append(f"| {name} | {summary['global_accuracy']:.1%} | {summary['bytes_up'] / 1e6:.2f} MB |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
