"""Test MasterAdamW with Hugging Face's Trainer and accelerate, distributed checkpoints, DDP, FSDP and ZeRO."""

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from stepscope.config import StepConfig
from stepscope.model.transformer import TransformerLM
from stepscope.optimizations import MasterAdamW

# -- programs that save, load and train ------------------------------------------------------------------------


FIELDS: dict[str, Any] = {"size": "nano", "vocab_size": 32, "context_length": 8, "device": "cpu"}
CONFIG = StepConfig(**FIELDS)


def loss_of(model, number):
    tokens = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(number))
    return F.cross_entropy(model(tokens).float().flatten(0, 1), (tokens * 3 + 1).flatten() % 32)


def made(seed=0, rate=3e-3):
    torch.manual_seed(seed)
    model = TransformerLM(CONFIG)
    return model, MasterAdamW(model, rate)


def train(model, optimizer, numbers):
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_accelerate_saves_all_weights_and_resumes_bit_identically(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import load_file

    ends = []
    for resumed in (False, True):
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(*made(seed=int(resumed)))
        if resumed:
            accelerator.load_state(tmp_path / "state")
        else:
            train(model, optimizer, range(5))
            accelerator.save_state(tmp_path / "state")
            accelerator.save_model(model, tmp_path / "model")
        train(model, optimizer, range(5, 10))
        ends.append(optimizer.optimizer.master)
    assert torch.equal(*ends)
    for folder in ("state", "model"):
        assert (
            load_file(tmp_path / folder / "model.safetensors").keys()
            == TransformerLM(CONFIG).state_dict().keys()
        )


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = (torch.arange(16) + index) % 50
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_hugging_face_trainer_trains_and_resumes_bit_identically(tmp_path, monkeypatch, kind):
    """Train Llama, whose norms are computed in fp32, and GPT-2, which has biases; compare with torch's AdamW."""
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    configs = {
        "Llama": transformers.LlamaConfig(**sizes, intermediate_size=64),
        "GPT2": transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    }

    def run(folder, resume=None):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(configs[kind])
        if folder == "torch":
            optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
        else:
            optimizer = MasterAdamW(model, 3e-3)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 3, 12)
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder),
            max_steps=12,
            per_device_train_batch_size=8,
            logging_steps=4,
            save_steps=6,
            report_to=[],
            use_cpu=True,
            bf16=True,
            seed=1,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Sequences(), optimizers=(optimizer, schedule)
        )
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model

    expected, _ = run("torch")
    losses, model = run("masters")
    assert losses == pytest.approx(expected, rel=5e-3) and losses[-1] < losses[0]
    _, resumed = run("resumed", str(tmp_path / "masters" / "checkpoint-6"))
    assert all(map(torch.equal, model.state_dict().values(), resumed.state_dict().values()))


@pytest.mark.parametrize("kind", ["model", "parameters"])
def test_distributed_checkpoint_resumes_bit_identically(kind, tmp_path):
    """Load the checkpoint into a new model's and a new optimizer's state dicts, as torch's documentation does."""

    def make(seed, rate):
        torch.manual_seed(seed)
        model = TransformerLM(CONFIG)
        optimizer = MasterAdamW(model if kind == "model" else list(model.named_parameters()), rate)
        return model, optimizer

    model, optimizer = make(0, 3e-3)
    train(model, optimizer, range(5))
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    other, resumed = make(7, 1e-9)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, resumed)))
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert torch.equal(optimizer.master, resumed.master)
    assert train(model, optimizer, range(5, 8)) == train(other, resumed, range(5, 8))


# -- several processes ----------------------------------------------------------------------------------------


def refusal(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return "not refused"


def run_rank(rank, folder):
    """Train with DDP as one of two ranks that start with different weights; save the results for the tests."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {}
    for case in ("made first", "trained first"):
        model, optimizer = made(seed=rank)
        start = {name: master.clone() for name, master in optimizer.masters().items()}
        if case == "trained first":  # the ranks have different moments
            train(model, optimizer, [rank])
        wrapped = DistributedDataParallel(model)
        losses = train(wrapped, optimizer, range(rank, 20, 2))
        results[case] = {"start": start, "end": optimizer.masters(), "losses": losses}
    with torch.no_grad():  # a later write on one rank must not wait for the other rank
        if rank == 0:
            model.head.weight.mul_(2)
            model.head.weight.div_(2)
            optimizer.take_weights()
    wrapped = DistributedDataParallel(TransformerLM(CONFIG))
    results["wrapped first"] = [
        refusal(lambda: MasterAdamW(wrapped)),
        refusal(lambda: MasterAdamW(wrapped.module.parameters())),
    ]
    from torch.distributed.optim import ZeroRedundancyOptimizer

    results["zero"] = refusal(
        lambda: ZeroRedundancyOptimizer(TransformerLM(CONFIG).parameters(), optimizer_class=MasterAdamW)
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh))
    results["sharded"] = refusal(lambda: MasterAdamW([sharded]))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", ["made first", "trained first"])
def test_ddp_ranks_with_different_initial_weights_train_identically(ranks, case):
    first, second = (rank[case] for rank in ranks)
    assert not torch.equal(first["start"]["head.weight"], second["start"]["head.weight"])
    assert all(map(torch.equal, first["end"].values(), second["end"].values()))
    for rank in (first, second):
        assert rank["losses"][-1] < 0.9 * rank["losses"][0]


def test_ddp_wrapped_model_is_rejected(ranks):
    for rank in ranks:
        for message in rank["wrapped first"]:
            assert re.match(
                "create MasterAdamW before you wrap the model in DistributedDataParallel", message
            )


def test_sharded_parameters_are_rejected(ranks):
    for rank in ranks:
        assert "ZeroRedundancyOptimizer shards" in rank["zero"]
        assert "got a DTensor, but expected a plain tensor" in rank["sharded"]
