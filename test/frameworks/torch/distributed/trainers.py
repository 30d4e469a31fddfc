"""Scripts as the documentation of Lightning, Accelerate and transformers has them: `python trainers.py WHICH FOLDER`.

Each prints losses, which have to be the same with gloo and with ringtrain, and whose groups these were.
"""

import hashlib
import os
import pathlib
import re
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
FOLDER = sys.argv[2]


def tell(losses):
    if dist.get_rank() == 0:
        kind = type(dist.group.WORLD).__module__.partition(".")[0]
        print(f"groups of {kind}, {dist.get_world_size()} ranks, losses {losses}", flush=True)


def samples(count=64):
    torch.manual_seed(1)
    return TensorDataset(torch.randn(count, 16), torch.randint(0, 4, (count,)))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def lightning():
    """Lightning starts the second rank itself."""
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

    class LitClassifier(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.log("train_loss", loss, sync_dist=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val_loss", nn.functional.cross_entropy(self.model(x), y), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    L.seed_everything(3)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=os.environ.get("BACKEND", "gloo")),
        default_root_dir=FOLDER,
        logger=False,
        enable_progress_bar=False,
        sync_batchnorm=False,
    )
    data = samples()
    trainer.fit(LitClassifier(), DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
    tell({name: value.item() for name, value in sorted(trainer.callback_metrics.items())})


def accelerate():
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(4)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    data = DataLoader(samples(60), batch_size=8, shuffle=True)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    losses = []
    for _ in range(2):
        for inputs, targets in data:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
        losses.append(accelerator.gather_for_metrics(loss).mean().item())
    accelerator.wait_for_everyone()
    accelerator.save_state(f"{FOLDER}/state")
    tell(losses)
    accelerator.end_training()


def trainer():
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    tokens = torch.randint(0, 64, (48, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=FOLDER,
        use_cpu=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-3,
        eval_strategy="epoch",
        logging_steps=1,
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        seed=5,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:16])
    trainer.train()
    history = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
    tell([loss for loss in history if loss is not None])


def tensor_parallel():
    """Infers, trains and writes with a model of which each rank has a share, beside the whole model."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    whole = LlamaForCausalLM(config)
    saved = f"{FOLDER}/llama-{os.environ['RANK']}"
    whole.save_pretrained(saved)
    model = AutoModelForCausalLM.from_pretrained(saved, distributed_config=DistributedConfig(tp_plan="auto"))
    share = model.model.layers[0].self_attn.q_proj.weight.to_local()
    assert share.shape == (64 // dist.get_world_size(), 64)

    tokens = torch.randint(1, 64, (2, 12))
    losses = []
    for _ in range(4):
        with torch.no_grad():
            # Each rank sums half of the products, so the last bits differ from those of the whole model.
            torch.testing.assert_close(model(tokens).logits, whole(tokens).logits, rtol=1e-4, atol=1e-5)
        for one in (model, whole):
            loss = one(tokens, labels=tokens).loss
            loss.backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
            losses.append(loss.item())
    assert losses[-2] < losses[0], losses
    written = [one.generate(tokens[:1], max_new_tokens=8, do_sample=False) for one in (model, whole)]
    assert torch.equal(*written)
    logits = model(tokens).logits.detach().numpy()
    tell([*losses[::2], written[0].tolist(), hashlib.sha256(logits.tobytes()).hexdigest()])


def page(number):
    """Returns code about preemption of docs/launching.md: block 0 is for Lightning, 1 for Accelerate."""
    text = (pathlib.Path(__file__).parents[4] / "docs" / "launching.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text[text.index("In **Lightning**") :], re.DOTALL | re.MULTILINE)
    return blocks[number]


def lightning_preempted():
    """Started by ringrun, until it is told to end; started again, for three steps from the checkpoint on."""
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

    import ringtrain as hvd

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, batch_idx):
            print(f"step {self.global_step}", flush=True)
            x, y = batch
            return nn.functional.cross_entropy(self.model(x), y)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    names = {"lightning": L, "hvd": hvd}
    exec(page(0), names)
    checkpoint = pathlib.Path("preempted.ckpt")
    done = torch.load(checkpoint, weights_only=False)["global_step"] if checkpoint.exists() else None
    trainer = L.Trainer(
        max_steps=-1 if done is None else done + 3,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="ringtrain"),
        callbacks=[names["SaveWhenPreempted"]()],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    data = DataLoader(samples(4096), batch_size=8)
    trainer.fit(Model(), data, ckpt_path=None if done is None else checkpoint)


def accelerate_preempted():
    """The same."""
    from accelerate import Accelerator

    import ringtrain as hvd

    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=8))
    first, steps = 0, 1_000_000
    if os.path.exists("preempted"):
        accelerator.load_state("preempted")
        first = int(next(iter(optimizer.state.values()))["step"])
        steps = first + 3
    batch = next(iter(data))
    for step in range(first, steps):
        print(f"step {step}", flush=True)
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
        optimizer.step()
        exec(page(1), {"accelerator": accelerator, "hvd": hvd})


if __name__ == "__main__":
    scripts = {"lightning": lightning, "lightning_preempted": lightning_preempted}
    scripts |= {"accelerate": accelerate, "accelerate_preempted": accelerate_preempted}
    scripts |= {"trainer": trainer, "tensor_parallel": tensor_parallel}
    scripts[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
