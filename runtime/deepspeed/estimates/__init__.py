"""What scripts ask DeepSpeed for before they train: batch sizes of many worlds, flops of a model, bytes of a stage.

`dsrun plan` answers the same from a config and its machines, and knows more of them.
"""
