"""Assignment to buckets, flat memory, and handles: what needs no ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from comm_collectives.hooks.buckets import Span, assign_buckets, flat_layout, flat_memory, view_of
from comm_collectives.hooks.handle import (
    GRADIENTS,
    LAYERS,
    Handle,
    check_module,
    check_unregistered,
    handles_of,
    trainable_parameters,
)
from comm_utils.errors import ArgumentError, ArgumentTypeError


def of_bytes(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(size // dtype.itemsize, dtype=dtype) for size in sizes]


def test_a_bucket_ends_with_the_tensor_that_fills_it() -> None:
    assert assign_buckets(of_bytes(40, 40, 40, 200, 8, 8), 80) == [[0, 1], [2, 3], [4, 5]]
    assert assign_buckets(of_bytes(40, 40, 40, 40), 80, first_bucket_size_bytes=40) == [[0], [1, 2], [3]]
    assert assign_buckets([], 80) == []


def test_dtypes_have_buckets_of_their_own_in_the_order_of_completion() -> None:
    mixed = [*of_bytes(40), *of_bytes(40, dtype=torch.bfloat16), *of_bytes(40), *of_bytes(8, dtype=torch.bfloat16)]
    assert assign_buckets(mixed, 80) == [[0, 2], [1, 3]]


def test_layouts_align_tensors_and_pad_the_whole() -> None:
    layout = flat_layout(of_bytes(4, 0, 68, 4), multiple_of=7, extra_numel=2)
    assert layout.spans == (Span(0, 1), Span(16, 0), Span(16, 17), Span(48, 1))
    assert layout.numel == 56  # 49 + 2, padded to a multiple of 7


def test_views_keep_the_strides_of_dense_tensors() -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    gaps = torch.randn(4, 4)[:, :3]
    layout = flat_layout([images, gaps])
    flat = flat_memory(layout.numel, torch.float32, torch.device("cpu"), shared=False)
    for tensor, span in zip([images, gaps], layout.spans, strict=True):
        view = view_of(flat, span, tensor)
        view.copy_(tensor)
        assert torch.equal(view, tensor)
        assert view.data_ptr() == flat.data_ptr() + 4 * span.start
    assert view_of(flat, layout.spans[0], images).stride() == images.stride()
    assert float(flat.sum()) == pytest.approx(float(images.sum() + gaps.sum()), rel=1e-4)


def test_removal_undoes_in_reverse_order_and_only_once() -> None:
    model, done = nn.Linear(2, 2), list[int]()
    with Handle("register", model, trainable_parameters("register", model), GRADIENTS) as handle:
        handle.on_removal(lambda: done.append(1))
        handle.on_removal(lambda: done.append(2))
        assert handles_of(model) == [handle]
    handle.remove()
    assert done == [2, 1]
    assert not handle.is_registered
    assert handles_of(model) == []


def test_parameters_have_one_handle_of_a_kind() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers = Handle("register_layers", model, dict(model.named_parameters()), LAYERS)
    check_unregistered("register", dict(model.named_parameters()))
    gradients = Handle("register_gradients", model[1], dict(model[1].named_parameters()), GRADIENTS)
    with pytest.raises(ArgumentError, match=r"register: model: parameter '1.weight' has the hooks of register_gradie"):
        check_unregistered("register", dict(model.named_parameters()))
    check_unregistered("register", dict(model[0].named_parameters()))
    with pytest.raises(ArgumentError, match=r"the hooks of register_gradients\(\) were registered .* later"):
        layers.remove()
    gradients.remove()
    layers.remove()


def test_models_without_usable_parameters_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"register: model: got 'net'; expected a torch.nn.Module"):
        check_module("register", "net")
    with pytest.raises(ArgumentTypeError, match="'weight' has no shape yet; call the model once"):
        trainable_parameters("register", nn.LazyLinear(2))
    with torch.device("meta"):
        nowhere = nn.Linear(2, 2)
    with pytest.raises(ArgumentTypeError, match="'weight' is on the meta device"):
        trainable_parameters("register", nowhere)
    with pytest.raises(ArgumentError, match="without parameters that require gradients"):
        trainable_parameters("register", nn.ReLU())
