"""The auxiliary balance loss: transformers' values, its gradient, what a worker counts, and what it is for.

Legend: T tokens, X experts, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral_loss
from transformers.models.switch_transformers.modeling_switch_transformers import load_balancing_loss_func

from pdserve.kernels.routing import TopK
from pdserve.layers.moe import SPREAD_EVERY, ExpertLoad
from pdserve.layers.router_loss import BalanceLoss, Spread, probabilities
from pdserve.layers.routers import GShardRouter, Router, SwitchRouter, TokenChoice
from pdserve.worker.experts import ExpertWatch

EXPERTS = 6


def logits_of(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed)) * 2


@given(tokens=st.integers(1, 60), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_the_loss_is_transformers_of_switch_and_of_mixtral(tokens: int, seed: int) -> None:
    logits = logits_of(tokens, seed)
    probs = logits.softmax(-1)
    switch = load_balancing_loss_func(probs[None], probs.argmax(-1)[None])
    assert float(BalanceLoss(weight=1.0)(logits)) == pytest.approx(float(switch), rel=1e-5)
    for top_k in (2, 3):
        theirs = mixtral_loss((logits,), EXPERTS, top_k)
        ours = BalanceLoss(top_k=top_k, weight=float(top_k))(logits)
        assert float(ours) == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_its_gradient_is_that_of_its_values(top_k: int, sigmoid: bool) -> None:
    logits = logits_of(7, seed=3).double().requires_grad_()
    loss = BalanceLoss(top_k=top_k, weight=0.3, sigmoid=sigmoid)
    assert torch.autograd.gradcheck(loss, (logits,))
    loss(logits).backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() > 1e-3


def test_it_is_in_float32_for_a_router_in_bfloat16() -> None:
    logits = logits_of(50).bfloat16()
    loss = BalanceLoss(weight=1.0)(logits)
    assert loss.dtype is torch.float32
    assert torch.equal(loss, BalanceLoss(weight=1.0)(logits.float()))


@pytest.mark.parametrize(
    ("router", "loss"),
    [
        (SwitchRouter(factor=0.5), BalanceLoss(weight=1.0)),
        (GShardRouter(0.5, 1), BalanceLoss(weight=1.0)),
        (TokenChoice(how=TopK(top_k=2, normalise=True)), BalanceLoss(top_k=2, weight=1.0)),
        (
            TokenChoice(how=TopK(top_k=3, normalise=True, sigmoid=True)),
            BalanceLoss(top_k=3, weight=1.0, sigmoid=True),
        ),
    ],
)
def test_serving_and_training_have_the_same_value(router: Router, loss: BalanceLoss) -> None:
    """And a worker's sums over steps have that of all tokens at once."""
    logits = logits_of(90, seed=8)
    wanted = float(loss(logits))
    assert float(router.spread(logits).loss()) == pytest.approx(wanted, rel=1e-5)
    load = ExpertLoad(2, EXPERTS)
    watch = ExpertWatch("w", load.counts_LX, [1], spread=(load.chosen_LX, load.probs_LX))
    none = torch.zeros(EXPERTS, dtype=torch.int64)
    assert watch.balance_loss(0.0) == 0.0
    for first in range(0, 90, 30):
        for step in range(SPREAD_EVERY):  # the first of these counts
            tokens = logits[first : first + 30] if step == 0 else logits[:1]
            load.add(1, none, lambda tokens=tokens: router.spread(tokens))  # type: ignore[misc]
    assert float(load.balance()[1]) == pytest.approx(wanted, rel=1e-5)
    assert load.balance()[0].isnan()
    assert watch.balance_loss(1.0) == pytest.approx(wanted, rel=1e-5)
    assert watch.report(1.0).balance_losses == (watch.balance_loss(1.0),)
    load.reset()
    assert load.balance().isnan().all()


def test_choices_by_groups_and_bias_count_as_they_are() -> None:
    """The loss takes them from the router, not from the logits."""
    bias = torch.linspace(2, -2, EXPERTS)
    how = TopK(top_k=2, normalise=True, sigmoid=True, groups=3, top_groups=1)
    router, logits = TokenChoice(how=how, bias_X=bias), logits_of(40)
    experts = router(logits).experts_TC
    given_choices = BalanceLoss(top_k=2, weight=1.0, sigmoid=True)(logits, experts)
    assert float(router.spread(logits).loss()) == pytest.approx(float(given_choices), rel=1e-5)
    assert float(router.spread(logits).loss()) != pytest.approx(
        float(BalanceLoss(top_k=2, weight=1.0, sigmoid=True)(logits))
    )


def test_even_is_one_and_a_collapse_is_the_number_of_experts() -> None:
    even = torch.eye(EXPERTS).repeat(3, 1) * 50
    assert float(BalanceLoss(weight=1.0)(even)) == pytest.approx(1.0)
    collapsed = torch.zeros(5, EXPERTS)
    collapsed[:, 2] = 50.0
    assert float(BalanceLoss(weight=1.0)(collapsed)) == pytest.approx(EXPERTS)
    assert torch.allclose(probabilities(collapsed, sigmoid=True).sum(-1), torch.ones(5))
    none = Spread.of(torch.empty(0, 1, dtype=torch.int64), torch.empty(0, EXPERTS))
    assert none.loss().isnan()


def trained(weight: float) -> tuple[float, float]:
    """A Switch layer of linear experts learns six kinds of rows, each with a linear map of its own: the
    error, and the fullest expert's share. The gate begins with a lean to one, as gates come to by themselves.
    """
    random = torch.Generator().manual_seed(0)
    kind_T = torch.arange(240) % EXPERTS
    centre_XE, maps_XEE = (torch.randn(EXPERTS, *shape, generator=random) for shape in ((8,), (8, 8)))
    x_TE = 1.5 * centre_XE[kind_T] + 0.3 * torch.randn(240, 8, generator=random)
    y_TE = torch.einsum("te,tef->tf", x_TE, maps_XEE[kind_T]) / 4
    gate_XE = (0.05 * torch.randn(EXPERTS, 8, generator=random)).requires_grad_()
    lean_X = torch.eye(EXPERTS)[0].requires_grad_()
    experts_XEE = (0.1 * torch.randn(EXPERTS, 8, 8, generator=random)).requires_grad_()
    balance, parameters = BalanceLoss(weight=weight), [gate_XE, lean_X, experts_XEE]
    for _ in range(200):
        logits_TX = x_TE @ gate_XE.T + lean_X
        weight_T, expert_T = logits_TX.softmax(-1).max(-1)
        out_TE = weight_T[:, None] * torch.einsum("te,tef->tf", x_TE, experts_XEE[expert_T])
        error = torch.nn.functional.mse_loss(out_TE, y_TE)
        grads = torch.autograd.grad(error + balance(logits_TX), parameters)
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter -= 0.5 * grad
    return error.item(), torch.bincount(expert_T, minlength=EXPERTS).max().item() / len(x_TE)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Products this small are slower on several, by far where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
def test_a_router_trained_with_it_ends_more_balanced_than_without() -> None:
    """And learns better here, as experts are of use."""
    error, fullest = trained(0.0)
    error_balanced, fullest_balanced = trained(0.5)
    assert fullest > 0.9
    assert fullest_balanced < 0.3
    assert error_balanced < error
