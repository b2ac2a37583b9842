"""Functions that build public models and their batches from configurations, without any download.

    stepscope ladder bench/public_models.py:llama -p batch=4

Most models need transformers, and a few need torchvision. ``python -m bench.public_ladder`` measures all of them.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Built = tuple[Any, ...]


def tokens(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(vocabulary, (batch, length))


def causal(model: nn.Module, vocabulary: int, batch: int, length: int) -> Built:
    ids = tokens(vocabulary, batch, length)
    return model, {"input_ids": ids, "labels": ids}


def images(model: nn.Module, batch: int, size: int, **options: Any) -> Built:
    """Return an image classifier from transformers with its batch."""
    return model, {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(1000, (batch,)),
        **options,
    }


def classified(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output, batch["labels"])


def torchvision_classifier(model: nn.Module, batch: int, size: int) -> Built:
    pixels, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    return model, {"x": pixels, "labels": labels}, classified


# Language models


def llama(batch: int = 8, length: int = 512, layers: int = 12, width: int = 768) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        use_cache=False,
    )
    return causal(LlamaForCausalLM(config), 32_000, batch, length)


def gpt2(batch: int = 8, length: int = 1024, layers: int = 12) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, use_cache=False)
    return causal(GPT2LMHeadModel(config), config.vocab_size, batch, length)


def qwen3(batch: int = 4, length: int = 512, layers: int = 28) -> Built:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        use_cache=False,
    )
    return causal(Qwen3ForCausalLM(config), 32_000, batch, length)


def gemma2(batch: int = 4, length: int = 512, layers: int = 12) -> Built:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        use_cache=False,
    )
    return causal(Gemma2ForCausalLM(config), 32_000, batch, length)


def opt(batch: int = 8, length: int = 512, layers: int = 12) -> Built:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(num_hidden_layers=layers, use_cache=False)
    return causal(OPTForCausalLM(config), config.vocab_size, batch, length)


# Mixtures of experts


def mixtral(batch: int = 4, length: int = 512, layers: int = 6) -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=8,
        use_cache=False,
    )
    return causal(MixtralForCausalLM(config), 32_000, batch, length)


def olmoe(batch: int = 4, length: int = 512, layers: int = 6) -> Built:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        num_experts=16,
        use_cache=False,
    )
    return causal(OlmoeForCausalLM(config), 32_000, batch, length)


# Encoders


def bert(batch: int = 16, length: int = 512, layers: int = 12) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(num_hidden_layers=layers)
    return causal(BertForMaskedLM(config), config.vocab_size, batch, length)


def modernbert(batch: int = 16, length: int = 512, layers: int = 22) -> Built:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(num_hidden_layers=layers)
    return causal(ModernBertForMaskedLM(config), config.vocab_size, batch, length)


def deberta(batch: int = 8, length: int = 512, layers: int = 12) -> Built:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=12,
        relative_attention=True,
        position_buckets=256,
        pos_att_type=["p2c", "c2p"],
    )
    return causal(DebertaV2ForMaskedLM(config), 32_000, batch, length)


# Encoder-decoders


def t5(batch: int = 8, length: int = 512, layers: int = 12) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768, d_ff=3072, num_layers=layers, num_heads=12, decoder_start_token_id=0, use_cache=False
    )
    return causal(T5ForConditionalGeneration(config), config.vocab_size, batch, length)


def bart(batch: int = 8, length: int = 512, layers: int = 6) -> Built:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        d_model=768,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        use_cache=False,
    )
    return causal(BartForConditionalGeneration(config), config.vocab_size, batch, length)


# Vision transformers


def vit(batch: int = 64, size: int = 224, layers: int = 12) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_hidden_layers=layers, image_size=size, num_labels=1000)
    return images(ViTForImageClassification(config), batch, size)


def dinov2(batch: int = 64, size: int = 224, layers: int = 12) -> Built:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    config = Dinov2Config(num_hidden_layers=layers, image_size=size, num_labels=1000, use_mask_token=False)
    return images(Dinov2ForImageClassification(config), batch, size)


def swin(batch: int = 64, size: int = 224) -> Built:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=size, num_labels=1000)
    return images(SwinForImageClassification(config), batch, size)


# Convolutional networks


def convnext(batch: int = 64, size: int = 224) -> Built:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(num_labels=1000)
    return images(ConvNextForImageClassification(config), batch, size)


def resnet(batch: int = 64, size: int = 224) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_labels=1000)
    return images(ResNetForImageClassification(config), batch, size)


def resnet50(batch: int = 64, size: int = 224) -> Built:
    from torchvision.models import resnet50 as make

    return torchvision_classifier(make(), batch, size)


def efficientnet(batch: int = 64, size: int = 224) -> Built:
    from torchvision.models import efficientnet_b0

    return torchvision_classifier(efficientnet_b0(), batch, size)


# U-Nets


def double_convolution(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015, arXiv:1505.04597) with padding and batch norm."""

    def __init__(self, width: int, depth: int, classes: int):
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        self.grow = nn.ModuleList()
        before = 3
        for after in widths:
            self.down.append(double_convolution(before, after))
            before = after
        for after in reversed(widths[:-1]):
            self.grow.append(nn.ConvTranspose2d(2 * after, after, 2, stride=2))
            self.up.append(double_convolution(2 * after, after))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down[:-1]:
            x = block(x)
            skipped.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.down[-1](x)
        for grow, block in zip(self.grow, self.up):
            x = block(torch.cat([skipped.pop(), grow(x)], 1))
        return self.head(x)


def unet(batch: int = 8, size: int = 256, width: int = 64, depth: int = 5, classes: int = 21) -> Built:
    pixels, labels = torch.randn(batch, 3, size, size), torch.randint(classes, (batch, size, size))
    return UNet(width, depth, classes), {"x": pixels, "labels": labels}, classified


# Speech


def whisper(batch: int = 4, frames: int = 3000, length: int = 128, layers: int = 6) -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=512,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        max_source_positions=frames // 2,
        use_cache=False,
    )
    features = torch.randn(batch, config.num_mel_bins, frames)
    model = WhisperForConditionalGeneration(config)
    return model, {"input_features": features, "labels": tokens(config.vocab_size, batch, length)}


def wav2vec2(batch: int = 4, samples: int = 160_000, layers: int = 12, length: int = 64) -> Built:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        num_hidden_layers=layers,
        ctc_loss_reduction="mean",
        apply_spec_augment=False,
        layerdrop=0.0,
        mask_time_prob=0.0,  # so that every parameter gets a gradient
    )
    labels = torch.randint(1, config.vocab_size, (batch, length))
    return Wav2Vec2ForCTC(config), {"input_values": torch.randn(batch, samples), "labels": labels}


# State spaces and recurrence


def mamba(batch: int = 4, length: int = 256, layers: int = 6) -> Built:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=32_000, num_hidden_layers=layers, use_cache=False)
    return causal(MambaForCausalLM(config), 32_000, batch, length)


class Recurrent(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return self.head(hidden)


def token_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def lstm(batch: int = 32, length: int = 256, width: int = 1024, layers: int = 2) -> Built:
    ids = tokens(10_000, batch, length)
    return Recurrent(width, layers, 10_000), {"input_ids": ids, "labels": ids}, token_loss


# Steps that do different work


class TokenDropping(nn.Module):
    """A vision transformer that trains on a random number of patches, and predicts the class from their mean."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # (batch, patches, width)
        kept = random.randint(x.shape[1] // 2, x.shape[1])
        x = x[:, torch.randperm(x.shape[1], device=x.device)[:kept]]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def token_dropping(batch: int = 64, size: int = 224, width: int = 384, layers: int = 6) -> Built:
    return torchvision_classifier(TokenDropping(width, layers), batch, size)


# The kind of each model, and the package that it needs.
MODELS: dict[Callable[..., Built], tuple[str, str]] = {
    llama: ("language model", "transformers"),
    gpt2: ("language model", "transformers"),
    qwen3: ("language model", "transformers"),
    gemma2: ("language model", "transformers"),
    opt: ("language model", "transformers"),
    mixtral: ("mixture of experts", "transformers"),
    olmoe: ("mixture of experts", "transformers"),
    bert: ("encoder", "transformers"),
    modernbert: ("encoder", "transformers"),
    deberta: ("encoder", "transformers"),
    t5: ("encoder-decoder", "transformers"),
    bart: ("encoder-decoder", "transformers"),
    vit: ("vision transformer", "transformers"),
    dinov2: ("vision transformer", "transformers"),
    swin: ("vision transformer", "transformers"),
    convnext: ("convolutional network", "transformers"),
    resnet: ("convolutional network", "transformers"),
    resnet50: ("convolutional network", "torchvision"),
    efficientnet: ("convolutional network", "torchvision"),
    unet: ("U-Net", "torch"),
    whisper: ("speech", "transformers"),
    wav2vec2: ("speech", "transformers"),
    mamba: ("state space model", "transformers"),
    lstm: ("recurrent network", "torch"),
    token_dropping: ("vision transformer", "torch"),
}
