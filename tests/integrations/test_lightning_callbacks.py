"""Callbacks of Lightning's Trainer that freeze, thaw and prune: losses and weights are those of the
plain trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import infinity

lightning = pytest.importorskip("lightning")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


SWAP = "_swap_models"


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(8, 16, bias=False)  # a norm leaves a bias rounding errors to follow
        self.backbone = nn.Sequential(first, nn.BatchNorm1d(16), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = self.head(self.backbone(batch)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


def fitted(
    directory: Path, make: Callable[[Module], Any], ours: bool, kind: type[Module] = Module
) -> Module:
    from infinity.integrations.lightning import InfinityStrategy

    torch.manual_seed(0)
    module = kind()
    drive = directory / "drive"
    drive.mkdir(exist_ok=True)
    tuning = infinity.Tuning(cache=0, device="cpu")
    config = infinity.Config(nvme=drive, parameters="nvme", optimizer="nvme", tuning=tuning)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=InfinityStrategy(config) if ours else "auto",
        max_epochs=3,
        callbacks=[make(module)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    rows = [torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    trainer.fit(module, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    return module


def finetuning(module: Module) -> Any:
    from lightning.pytorch.callbacks import BackboneFinetuning

    return BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=1e-3, train_bn=False)


def pruning(**options: Any) -> Callable[[Module], Any]:
    from lightning.pytorch.callbacks import ModelPruning

    def make(module: Module) -> Any:
        places = [(module.head, "weight"), (module.backbone[0], "weight")]
        usual: dict[str, Any] = {"amount": 0.3, "parameters_to_prune": places}
        usual["use_global_unstructured"] = False
        return ModelPruning(**usual | options)

    return make


CALLBACKS: dict[str, Callable[[], Callable[[Module], Any]]] = {
    "finetuning": lambda: finetuning,
    "pruning": lambda: pruning(pruning_fn="l1_unstructured"),
    "pruning without resets": lambda: pruning(
        pruning_fn="l1_unstructured", use_lottery_ticket_hypothesis=False
    ),
    "pruning of all at once": lambda: pruning(
        pruning_fn="l1_unstructured", use_global_unstructured=True
    ),
    "pruning of rows": lambda: pruning(
        pruning_fn="ln_structured", pruning_dim=0, pruning_norm=2, resample_parameters=False
    ),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_that_freeze_thaw_and_prune(tmp_path: Path, name: str) -> None:
    make = CALLBACKS[name]()
    plain = fitted(tmp_path, make, ours=False)
    found = fitted(tmp_path, make, ours=True)
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    expected = plain.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for key, value in found.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
    for parameter, other in zip(found.parameters(), plain.parameters(), strict=True):
        assert parameter.requires_grad == other.requires_grad
    infinity.engine(found).close()


def test_what_stays_frozen_takes_no_states(tmp_path: Path) -> None:
    """Without a callback that thaws, as before."""

    class Frozen(lightning.Callback):  # type: ignore[misc]
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            module.backbone.requires_grad_(False)

    found = fitted(tmp_path, lambda module: Frozen(), ours=True)
    with pytest.raises(infinity.ConfigError, match="was frozen"):
        found.backbone[0].weight.requires_grad_(True)
    infinity.engine(found).close()


class Validated(Module):
    def validation_step(self, batch: Any, number: int) -> None:
        self.losses.append(self.head(self.backbone(batch)).square().mean().item())

    def val_dataloader(self) -> Any:
        return DataLoader([torch.full((8,), float(i)) for i in range(4)], batch_size=2)  # type: ignore[arg-type]


def test_averages_are_validated_and_kept(tmp_path: Path) -> None:
    from lightning.pytorch import callbacks

    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no averages of weights")

    def make(module: Module) -> Any:
        return callbacks.EMAWeightAveraging(decay=0.8)

    plain = fitted(tmp_path, make, ours=False, kind=Validated)
    found = fitted(tmp_path, make, ours=True, kind=Validated)
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    for value, expected in zip(
        found.state_dict().values(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    infinity.engine(found).close()


def test_masters_come_back_after_a_validation(tmp_path: Path) -> None:
    """With the bits that a parameter in bf16 has no room for."""
    from lightning.pytorch import callbacks
    from torch.optim.swa_utils import AveragedModel

    from infinity.integrations.lightning_callbacks import adjust

    if not hasattr(callbacks, "WeightAveraging"):
        pytest.skip("this Lightning has no averages of weights")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    callback, averages = callbacks.WeightAveraging(), AveragedModel(model.bfloat16())
    vars(callback)["_average_model"] = averages
    averages.module[0].weight.data.fill_(2)
    model = infinity.wrap(model.float(), infinity.Config(nvme=tmp_path, precision="bf16"))
    weight = model[0].weight
    infinity.set(weight, "master", torch.full((8, 8), 1.00001))
    with adjust([callback]), infinity.engine(model):
        getattr(callback, SWAP)(model)
        assert (infinity.get(weight, "master") == 2).all()
        assert (averages.module[0].weight == 1).all()
        getattr(callback, SWAP)(model)
        assert (infinity.get(weight, "master") == torch.tensor(1.00001)).all()
        assert (averages.module[0].weight == 2).all()
