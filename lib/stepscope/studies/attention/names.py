"""What each implementation is called where it is named to a reader."""

NAMES = {"eager": "written out", "compiled": "compiled", "flash": "SDPA flash",
         "efficient": "SDPA memory-efficient", "cudnn": "SDPA cuDNN", "math": "SDPA math",
         "flex": "FlexAttention", "fa4": "FlashAttention-4"}
