"""The strategies for Lightning's Trainer and for Fabric, and the `Accelerator`, against the same
loop with a plain model. Module, loop and optimizers of torch stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import infinity
from support.models import FAMILIES, text_batch
from support.roads import OWN, road

lightning = pytest.importorskip("lightning")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def batches() -> Any:
    rows = [{k: v[0] for k, v in text_batch(number, rows=1).items()} for number in range(12)]
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def config(directory: Path, **options: Any) -> infinity.Config:
    directory.mkdir(exist_ok=True)
    return infinity.Config(nvme=directory, tuning=infinity.Tuning(cache=0), **options)


def same_weights(found: nn.Module, expected: nn.Module) -> None:
    theirs = expected.state_dict()
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A Llama that is built by `configure_model`, with a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.scale = nn.Parameter(torch.ones(()))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = FAMILIES["llama"].build()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = self.model(**batch).loss * self.scale
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("validation", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fitted(directory: Path, strategy: Any, resume: Path | None = None) -> tuple[Module, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    module = Module()
    keep = ModelCheckpoint(
        directory, "{step}", every_n_train_steps=2, save_top_k=-1, monitor=None, save_last="link"
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=4,
        accumulate_grad_batches=1,
        gradient_clip_val=0.5,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(module, batches(), batches(), ckpt_path=resume)
    return module, trainer


@road("lightning", "`Trainer`", "`python`", OWN)
def test_a_trainer_and_its_checkpoints(tmp_path: Path) -> None:
    """Losses, weights, validation of the last checkpoint, a resume of one, and of a plain one."""
    from infinity.integrations.lightning import InfinityStrategy

    plain, theirs = fitted(tmp_path / "plain", "auto")
    ours = InfinityStrategy(config(tmp_path / "drive"))
    found, trainer = fitted(tmp_path / "ours", ours)
    assert found.losses == pytest.approx(plain.losses, rel=1e-6)
    same_weights(found, plain)
    last = tmp_path / "ours" / "step=4.ckpt"
    assert (last / "infinity").is_dir()
    expected = theirs.validate(plain, batches(), verbose=False)[0]
    metrics = trainer.validate(found, batches(), ckpt_path=last, verbose=False)[0]
    assert metrics["validation"] == pytest.approx(expected["validation"], rel=1e-6)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(value, weights[k]) for k, value in found.state_dict().items())
    trainer.fit_loop.max_epochs = 2  # a second fit makes other optimizers
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(found, batches())
    assert len(found.losses) == 6
    infinity.engine(found).close()

    again, _ = fitted(tmp_path / "plain2", "auto", tmp_path / "plain" / "step=2.ckpt")
    for source in ("ours", "plain"):
        ours = InfinityStrategy(config(tmp_path / "drive"))
        resumed, _ = fitted(tmp_path / f"{source}2", ours, tmp_path / source / "step=2.ckpt")
        assert resumed.losses == pytest.approx(again.losses, rel=1e-6)
        same_weights(resumed, again)
        infinity.engine(resumed).close()


@road("lightning", "Fabric", "`python`", OWN)
def test_fabric(tmp_path: Path) -> None:
    """Accumulation, clipping, a scheduler and a checkpoint. `init_module` builds without memory,
    so that the parameters are others after `setup`."""
    from infinity.integrations.lightning import InfinityFabricStrategy

    runs = []
    for ours in (False, True):
        own = InfinityFabricStrategy(config(tmp_path / "drive")) if ours else "auto"
        fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=own)
        fabric.launch()
        with fabric.init_module():
            model = FAMILIES["llama"].build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)
        losses = []
        for number in range(6):
            loss = model(**text_batch(number)).loss
            with fabric.no_backward_sync(model, enabled=ours and number % 2 == 0):
                fabric.backward(loss / 2)
            losses.append(loss.item())
            if number % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        state = {"model": model, "optimizer": optimizer, "step": 3}
        fabric.save(tmp_path / f"state{ours}", state)
        with torch.no_grad(), infinity.gathered(list(model.parameters()), write=True):
            for parameter in model.parameters():
                parameter.zero_()
        state["step"] = 0
        assert fabric.load(tmp_path / f"state{ours}", state) == {}
        assert state["step"] == 3
        runs.append((losses, model.module))
    (expected, plain), (found, wrapped) = runs
    assert found == pytest.approx(expected, rel=1e-6)
    same_weights(wrapped, plain)
    infinity.engine(wrapped).close()


@road("accelerate", "`Accelerator`", "`python`", OWN)
def test_an_accelerator(tmp_path: Path) -> None:
    """It wraps in `prepare`, and converts the optimizer, whose scheduler goes with it."""
    import accelerate

    from infinity.integrations.accelerate import Accelerator

    accelerate.state.AcceleratorState._reset_state(True)  # another test may have chosen bf16
    runs = []
    for ours in (False, True):
        accelerator = (
            Accelerator(cpu=True, infinity_config=config(tmp_path / "drive"))
            if ours
            else accelerate.Accelerator(cpu=True)
        )
        model = FAMILIES["llama"].build()
        # With a smaller eps the first step is the sign of a gradient, however small that is.
        optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, batches(), scheduler
        )
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, model))
    (expected, plain), (found, wrapped) = runs
    assert found == pytest.approx(expected, rel=1e-6)
    same_weights(wrapped, plain)
    infinity.engine(wrapped).close()


@pytest.mark.parametrize("by", ["initialize", "wrap"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_module_says_its_dtype(by: str, precision: str) -> None:
    """As after the `half()` of DeepSpeed; its buffers keep theirs."""
    module = Module()
    module.register_buffer("table", torch.ones(2))
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    here = {"device": "cpu"}
    if by == "wrap":
        infinity.wrap(module, infinity.Config(precision=precision, tuning=here))
    else:
        config = {"train_batch_size": 1, precision: {"enabled": True}, "infinity": {"tuning": here}}
        engine, *_ = infinity.initialize(model=module, config=config)
    found = [module.dtype, module.scale.dtype, module.table.dtype]
    (infinity.engine(module).close if by == "wrap" else engine.destroy)()
    assert found == [dtype, dtype, torch.float32] and module.device == torch.device("cpu")


def test_an_optimizer_of_before_is_refused() -> None:
    """Prepared alone, it would train parameters that the model has no more."""
    from infinity.integrations.accelerate import Accelerator

    with infinity.init():
        model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = Accelerator(cpu=True, infinity_config=infinity.Config())
    accelerator.prepare(model)
    with pytest.raises(infinity.ConfigError, match="of before the model was wrapped"):
        accelerator.prepare(optimizer)
    infinity.engine(model).close()
