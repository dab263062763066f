"""The torch half of a training rank, in this process: exact sums, bad gradients, padding."""

from __future__ import annotations

import math

import pytest
import torch

from tide_trainer.backends.fsdp_worker import FsdpWorker, NotFinite
from tide_trainer.backends.losses import Totals
from tide_trainer.backends.tiny_model import TinyModel, make_tiny_model
from tide_trainer.backends.training_wire import FsdpSettings, RankSettings, pack
from tide_trainer.objectives import LossSettings
from tide_trainer.types import Sequence

WORDS = [f"w{number}" for number in range(9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return str(make_tiny_model(folder, WORDS, TinyModel(hidden=32, layers=2, heads=2, kv_heads=1, feed_forward=32)))


def worker(model, **settings):
    made = FsdpWorker(RankSettings(FsdpSettings(model, "", device="cpu", **settings), 0, "", ""))
    made.boot(None)
    return made


def sequence(ids, sampled, advantage):
    logprobs = tuple(-2.0 - 0.1 * i if s else 0.0 for i, s in enumerate(sampled))
    return pack(Sequence(tuple(ids), tuple(map(bool, sampled)), logprobs, advantage))


SEQUENCES = [
    sequence([3, 8, 9, 2, 3], [0, 0, 1, 1, 0], 1.0),
    sequence([3, 8, 10, 2, 3, 9, 9, 9], [0, 0, 1, 0, 0, 1, 1, 1], -0.5),
    sequence([3, 8], [0, 1], 0.25),
]
TOTALS = Totals(7, 3)


def weights(made):
    return {name: tensor.clone() for name, tensor in made._full_tensors().items()}


def gradients(made, micro_batches, objective="policy"):
    """The gradient of an update that moves nothing: plain sums, before any clip."""
    found = {}
    step = made._optimizer.step
    made._optimizer.step = lambda: found.update(
        {n: p.grad.clone() for n, p in made._model.inner.named_parameters()}
    )  # fmt: skip
    answer = made.train(objective, micro_batches, TOTALS, None)
    made._optimizer.step = step
    return found, answer


@pytest.mark.parametrize("objective", ["policy", "supervised"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_any_split_into_micro_batches_gives_the_same_gradient(model, objective, aggregation):
    loss = LossSettings(aggregation=aggregation, entropy_coefficient=0.01)
    made = worker(model, max_grad_norm=0.0, loss=loss)
    whole, one = gradients(made, [SEQUENCES], objective)
    for micro_batches in ([[s] for s in SEQUENCES], [SEQUENCES[:2], [], SEQUENCES[2:], []]):
        split, many = gradients(made, micro_batches, objective)
        assert many["metrics"]["loss_sum"] == pytest.approx(one["metrics"]["loss_sum"], abs=1e-6)
        for name, value in whole.items():
            torch.testing.assert_close(split[name], value, atol=1e-6, rtol=0)


def test_tokens_to_the_right_of_the_last_trained_one_change_nothing(model):
    made = worker(model, max_grad_norm=0.0)
    whole, _ = gradients(made, [SEQUENCES])
    longer = [{**s, "ids": [*s["ids"], 2, 0, 5]} for s in SEQUENCES]
    padded, _ = gradients(made, [longer])
    for name, value in whole.items():
        torch.testing.assert_close(padded[name], value, atol=1e-6, rtol=0)


def test_a_gradient_that_is_not_finite_changes_nothing(model):
    made = worker(model)
    before = weights(made)
    bad = [{**SEQUENCES[0], "advantage": math.inf}]
    with pytest.raises(NotFinite):
        made.train("policy", [bad], TOTALS, None)
    assert all(torch.equal(before[name], value) for name, value in weights(made).items())
    made.train("policy", [SEQUENCES], TOTALS, None)
    assert all(bool(value.isfinite().all()) for value in weights(made).values())


def test_the_gradient_is_clipped_and_the_norm_reported_before_it(model):
    free, first = gradients(worker(model, max_grad_norm=0.0), [SEQUENCES])
    clipped, second = gradients(worker(model, max_grad_norm=0.1), [SEQUENCES])
    assert second["grad_norm"] == pytest.approx(first["grad_norm"])
    assert math.sqrt(sum(float(g.square().sum()) for g in clipped.values())) == pytest.approx(0.1, rel=1e-3)
    assert first["grad_norm"] == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in free.values())), rel=1e-5)


def test_a_learning_rate_of_the_batch_replaces_the_configured_one_for_that_update_only(model):
    made = worker(model, learning_rate=0.5)
    made.train("policy", [SEQUENCES], TOTALS, 1e-9)
    assert made._optimizer.param_groups[0]["lr"] == 1e-9
    made.train("policy", [SEQUENCES], TOTALS, None)
    assert made._optimizer.param_groups[0]["lr"] == 0.5


def test_a_change_of_objective_begins_with_fresh_moments(model):
    made = worker(model)
    steps = []
    for objective in ["supervised", "supervised", "policy", "policy"]:
        made.train(objective, [SEQUENCES], TOTALS, None)
        steps.append(int(next(iter(made._optimizer.state.values()))["step"]))
    assert steps == [1, 2, 1, 2]


def test_only_sampled_positions_train_and_never_the_first(model):
    assert pack(Sequence((5, 6, 7), (True, False, True), (-1.0, 0.0, -2.0), 1.0)) == {
        "ids": [5, 6, 7],
        "trained": [2],
        "logprobs": [-2.0],
        "advantage": 1.0,
    }


def test_scores_equal_transformers(model):
    from transformers import AutoModelForCausalLM

    ids = [3, 8, 10, 2, 3, 9]
    reference = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits.log_softmax(-1)[0, range(5), ids[1:]]
    batch = [{"ids": ids, "trained": [1, 2, 3, 4, 5]}, {"ids": [3, 4], "trained": [1]}]
    assert worker(model).score([batch])[0] == pytest.approx(expected.tolist(), abs=1e-5)
