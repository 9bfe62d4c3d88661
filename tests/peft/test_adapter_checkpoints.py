"""Checkpoints without the frozen base: small, and complete for a model that has the base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from support.adapted import BASE, batch, built, config, saved, train

pytestmark = pytest.mark.usefixtures("one_thread")


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def test_training_goes_on_from_the_adapters_alone(tmp_path: Path) -> None:
    """With the bits of a run that was not interrupted; the base stays in its files."""
    path, there = saved(tmp_path), tmp_path / "checkpoint"
    model = infinity.wrap(built(), config(tmp_path), weights=path)
    with infinity.engine(model) as engine:
        optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        train(model, optimizer)
        engine.save_checkpoint(there, optimizer, {"step": 3}, trainable_only=True)
        expected = {"losses": train(model, optimizer), **engine.state_dict()}
    assert size(there) < BASE / 2
    with infinity.init():
        model = built()
    model = infinity.wrap(model, config(tmp_path), weights=path, seed=5)
    with infinity.engine(model) as engine:
        before = engine.report().in_files
        optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1)
        assert engine.load_checkpoint(there, optimizer) == {"step": 3}
        assert engine.report().in_files == before > 0
        assert train(model, optimizer) == expected["losses"]
        for name, value in engine.state_dict().items():
            assert torch.equal(value, expected[name]), name


def test_a_checkpoint_of_all_loads_too(tmp_path: Path) -> None:
    """What it has of the base moves to the drives, because the files are only read."""
    path, there = saved(tmp_path), tmp_path / "checkpoint"
    model = infinity.wrap(built(), config(tmp_path), weights=path)
    with infinity.engine(model) as engine:
        engine.save_checkpoint(there)
    assert size(there) > BASE
    model = built()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model = infinity.wrap(model, config(tmp_path), weights=path)
    with infinity.engine(model) as engine:
        engine.load_checkpoint(there)
        for name, value in built().state_dict().items():
            assert torch.equal(engine.state_dict()[name], value), name


def test_what_was_left_out_cannot_be_loaded_where_it_is_trained(tmp_path: Path) -> None:
    there, model = tmp_path / "checkpoint", infinity.wrap(built(), config(tmp_path))
    with infinity.engine(model) as engine:
        engine.save_checkpoint(there, trainable_only=True)
    model = built()
    model.get_parameter("0.odd").requires_grad_(True)
    model = infinity.wrap(model, config(tmp_path))
    with infinity.engine(model) as engine:
        before = model(batch(0)).detach()
        with pytest.raises(
            infinity.CheckpointError, match=r"has no values of 0\.odd, because it was saved with"
        ):
            engine.load_checkpoint(there)
        assert torch.equal(model(batch(0)), before)
