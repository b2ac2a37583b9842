"""What the report calls each change, and how many lines of docs/fast_step.py make it."""

NAMES = {"fp32": "fp32, naive attention", "tf32": "TF32", "bf16": "bf16 autocast", "sdpa": "fused attention",
         "fused": "fused AdamW", "blocks": "compiled blocks", "cuda_graph": "CUDA graph of the step",
         "bf16_weights": "bf16 weights, fp32 masters", "bf16_moments": "bf16 moments",
         "chunked": "chunked loss", "fp8": "FP8 matmuls", "filled": "batch that fills the memory",
         "hugging_face": "Hugging Face, compiled", "hugging_face_graphs": "Hugging Face, reduce-overhead"}
LINES = {"tf32": 1, "bf16": 1, "sdpa": 1, "fused": 1, "blocks": 3}  # those before the CUDA graph
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
