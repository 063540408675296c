"""Probes have what a trainer's model computes, shown against a computation of one's own."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weightsync_client import InvalidError, Probes, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SEQUENCES = [[1, 5, 9, 2], list(range(40)), [3, 3]]
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def _model(**options: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.Qwen3Config(**TINY, attention_dropout=0.5, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


def _own(model: Any, sequences: list[list[int]]) -> list[list[float]]:
    """The log probability of each token but the first, from the definition."""
    was, found = model.training, []
    model.eval()
    for ids in sequences:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
        found.append([math.log(probabilities[at, ids[at + 1]]) for at in range(len(ids) - 1)])
    model.train(was)
    return found


def _assert_near(found: Any, own: list[list[float]]) -> None:
    assert [len(one) for one in found] == [len(one) for one in own]
    for ours, theirs in zip(found, own, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    meet = (tmp_path / "meet").as_uri()
    torch.distributed.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_they_are_what_the_model_computes_for_each_token() -> None:
    model = _model()
    probes = Probes.of(model, [torch.tensor(SEQUENCES[0]), *SEQUENCES[1:]])
    assert probes.tokens == tuple(map(tuple, SEQUENCES))
    assert probes.start == (1, 1, 1)
    _assert_near(probes.logprobs, _own(model, SEQUENCES))
    # Every one of a batch of one length, too.
    assert Probes.of(model, torch.tensor([[1, 2], [3, 4]])).tokens == ((1, 2), (3, 4))


def test_a_long_sequence_is_computed_in_pieces_and_is_whole() -> None:
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (512,)).tolist()
    model = _model()
    _assert_near(Probes.of(model, [ids]).logprobs, _own(model, [ids]))


def test_the_model_is_left_as_it_was() -> None:
    model = _model()
    model.train()
    # A part that is kept in evaluation mode while the rest is trained.
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    Probes.of(model, SEQUENCES)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()
    with pytest.raises(InvalidError, match="sequence 1 has the token id 64; the model knows 64"):
        Probes.of(model, [[1, 2], [1, 64]])
    assert [module.training for module in model.modules()] == modes


class _Noisy(torch.nn.Module):
    """Draws numbers, and computes others in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 8)
        self.drop = torch.nn.Dropout(0.9)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        found: torch.Tensor = self.drop(self.embed(ids))
        return found


def test_any_module_that_returns_logits_is_scored_in_evaluation_mode() -> None:
    model = _Noisy()
    state = torch.random.get_rng_state()
    probes = Probes.of(model, [[1, 2, 3]])
    expected = model.embed.weight.log_softmax(-1)
    assert probes.logprobs[0] == pytest.approx([expected[1, 2].item(), expected[2, 3].item()])
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)


class _Around(torch.nn.Module):
    """A model of transformers inside, and a call of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids: torch.Tensor) -> Any:
        return self.inner(ids).logits


def test_a_module_around_a_model_is_called_as_it_takes_it() -> None:
    model = _model()
    _assert_near(Probes.of(_Around(model), SEQUENCES).logprobs, _own(model, SEQUENCES))


def test_an_id_that_the_model_does_not_know_is_refused() -> None:
    without: Any = _Noisy()
    without.forward = lambda ids: torch.zeros(*ids.shape, 8)
    for model in (_Around(_model()), without):
        with pytest.raises(InvalidError, match="sequence 1 has the token id 999; the model knows"):
            Probes.of(model, [[1, 2], [3, 999]])


def _halves(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, ids.shape[1] - 1, 8)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_halves, r"logits of every token.*for ids of shape \(1, 3\) this returns \(1, 2, 8\)"),
        (lambda _: 7, "give a model that returns logits.* this returns int"),
        (lambda ids: torch.full((*ids.shape, 8), math.nan), "logprob of token 1 of sequence 0 is"),
    ],
)
def test_a_model_that_returns_no_logits_is_refused(
    answer: Callable[[torch.Tensor], Any], message: str
) -> None:
    model: Any = _Noisy()
    model.forward = answer
    with pytest.raises(InvalidError, match=message):
        Probes.of(model, [[1, 2, 3]])
    assert model.training


def test_no_module_is_refused() -> None:
    with pytest.raises(InvalidError, match=r"model is dict; give a torch.nn.Module"):
        Probes.of({}, [[1, 2]])  # type: ignore[arg-type]


def test_wrappers_are_scored_as_what_they_wrap() -> None:
    model = _model()
    compiled: Any = torch.compile(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for wrapped in (compiled, averaged, torch.nn.DataParallel(model)):
        assert Probes.of(wrapped, SEQUENCES) == Probes.of(model, SEQUENCES)


@pytest.mark.usefixtures("group")
def test_a_sharded_model_is_scored_by_all_its_ranks_and_sharded_afterwards() -> None:
    model = _model()
    whole = Probes.of(model, SEQUENCES)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _assert_near(Probes.of(model, SEQUENCES).logprobs, [list(one) for one in whole.logprobs])
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    assert kinds == {"DTensor"}
    # It trains on.
    model(torch.tensor([[1, 2]])).logits.sum().backward()


def test_adapters_are_merged_as_they_are_pushed() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    model.train()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    probes = Probes.of(model, SEQUENCES)
    for name, parameter in model.named_parameters():
        assert before[name][0] == parameter.data_ptr()
        assert torch.equal(before[name][1], parameter)
    assert model.training
    merged = model.merge_and_unload()
    _assert_near(probes.logprobs, _own(merged, SEQUENCES))


# What a caller gives.

WRONG = [
    (([],), "give 1 to 64 sequences, not 0"),
    (([[1, 2]] * 65,), "give 1 to 64 sequences, not 65"),
    ((7,), "the sequences is 7; use a list or a tensor"),
    (([[1]],), "give 2 to 512 token ids: sequence 0 has 1"),
    (([[1, 2], [1] * 513],), "give 2 to 512 token ids: sequence 1 has 513"),
    (([[1, -1]],), "token 1 of sequence 0 is -1; use token ids"),
    (([[1, 2**32]],), "token 1 of sequence 0 is 4294967296; use token ids"),
    (([[1.0, 2.0]],), "token 0 of sequence 0 is 1.0; use token ids"),
    (([[True, 2]],), "token 0 of sequence 0 is True; use token ids"),
    (([[1, 2]], [[-1.0]], 0), "start is 0 for sequence 0 of 2 tokens; use an index from 1 to 1"),
    (([[1, 2]], [[]], [1, 1]), "give one start for each of 1 sequences, not 2"),
    (([[1, 2, 3]], [[-1.0]]), "give 2 logprobs for sequence 0, one for each of its 3 tokens"),
    (([[1, 2]], []), "give logprobs for each of 1 sequences, not 0"),
    (([[1, 2]], [[math.nan]]), "the logprob of token 1 of sequence 0 is nan; use natural log"),
    (([[1, 2]], [[-math.inf]]), "the logprob of token 1 of sequence 0 is -inf; use natural log"),
    (([[1, 2]], [[0.5]]), "the logprob of token 1 of sequence 0 is 0.5; use natural log"),
    (([[1, 2]], [["x"]]), "the logprob of token 1 of sequence 0 is 'x'; use natural log"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_what_cannot_be_is_refused_in_a_sentence(given: Any, message: str) -> None:
    with pytest.raises(InvalidError) as caught:
        Probes(*given)
    assert caught.value.reason is Reason.REQUEST_INVALID
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_a_trainer_gives_its_own_figures() -> None:
    probes = Probes([[1, 2, 3], torch.tensor([4, 5])], [[-0.5], None], start=[2, 1])
    assert probes.logprobs == ((-0.5,), ())
    bare = Probes([[1, 2, 3]])
    assert bare.logprobs == ((),)
    # Of what rounding puts above 0.
    assert Probes([[1, 2]], [[1e-7]]).logprobs == ((0.0,),)
    message = probes.to_message()
    assert [list(probe.tokens) for probe in message.probes] == [[1, 2, 3], [4, 5]]
    assert [probe.start for probe in message.probes] == [2, 1]
    assert Probes.from_message(message) == probes


def test_the_largest_ones_fit_into_a_commit() -> None:
    probes = Probes([[2**32 - 1] * 512] * 64, [[-1.0] * 511] * 64)
    assert probes.to_message().ByteSize() <= 512 << 10


def test_a_file_holds_them_to_the_bit(tmp_path: Path) -> None:
    probes = Probes.of(_model(), SEQUENCES)
    path = tmp_path / "probes.json"
    probes.save(path)
    assert Probes.load(path) == probes
    document = json.loads(path.read_text())
    assert document["probes"][0]["tokens"] == SEQUENCES[0]
    # As somebody writes it by hand.
    path.write_text('{"probes": [{"tokens": [1, 2]}]}')
    assert Probes.load(path) == Probes([[1, 2]])


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b'{"probes": 1}', b'{"probes": [1]}', b"\xff", b"[" * 100_000],
)
def test_a_file_of_something_else_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "probes.json"
    path.write_bytes(text)
    with pytest.raises(InvalidError, match=r"give a file as Probes\.save writes it"):
        Probes.load(path)


def test_a_file_that_is_too_large_or_absent_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "probes.json"
    with pytest.raises(InvalidError, match="give a file of probes that can be read"):
        Probes.load(path)
    path.write_bytes(b" " * ((4 << 20) + 1))
    with pytest.raises(InvalidError, match="has more than 4 MiB"):
        Probes.load(path)
