"""Low-rank adapters (Hu et al. 2021) through the library peft: only the adapters and the head are trained."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from kilter.errors import Mistake


@dataclass(frozen=True)
class LoraSettings:
    """The adapters of `--lora`."""

    r: int = 8  # rank
    alpha: int = 16  # the adapters' outputs are scaled by alpha / r
    targets: tuple[str, ...] = ()  # names of linear layers


def parse_lora(text: str) -> LoraSettings | None:
    """From `r=8,targets=query+value`; None for an empty text.

    >>> parse_lora("r=4,targets=query+value").targets
    ('query', 'value')
    """
    if not text:
        return None
    values: dict[str, str] = dict.fromkeys(("r", "alpha", "targets"), "")
    for pair in filter(None, map(str.strip, text.split(","))):
        name, _, value = pair.partition("=")
        if name not in values or not value:
            raise Mistake(f"--lora takes r=8, alpha=16 and targets=query+value, separated by commas, not '{pair}'.")
        values[name] = value
    numbers = {name: values[name] or default for name, default in (("r", "8"), ("alpha", "16"))}
    for name, value in numbers.items():
        if not value.isdecimal() or not 0 < int(value) <= 1024:
            raise Mistake(f"{name} of --lora must be a whole number from 1 to 1024, not '{value}'.")
    if not values["targets"]:
        raise Mistake("--lora needs the names of the layers to adapt, such as targets=query+value.")
    return LoraSettings(int(numbers["r"]), int(numbers["alpha"]), tuple(values["targets"].split("+")))


def add_adapters(net: nn.Module, text: str) -> nn.Module:
    """The network with adapters; everything else except `head` is frozen."""
    settings = parse_lora(text)
    if settings is None:
        return net
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as e:
        raise Mistake(f"LoRA needs the library {e.name}: `pip install 'kilter[lora]'`.") from None
    names = [name for name, _ in net.named_modules()]
    absent = [t for t in settings.targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    config = LoraConfig(r=settings.r, lora_alpha=settings.alpha, target_modules=list(settings.targets))
    try:
        if absent:
            raise ValueError
        adapted: nn.Module = inject_adapter_in_model(config, net)
    except ValueError:
        linear = sorted({name.rpartition(".")[2] for name, m in net.named_modules() if isinstance(m, nn.Linear)})
        raise Mistake(
            f"The network has no linear layer '{(absent or settings.targets)[0]}': --lora can adapt {', '.join(linear)}."
        ) from None
    for name, parameter in adapted.named_parameters():
        if name.startswith("head."):
            parameter.requires_grad_(True)
    return adapted
