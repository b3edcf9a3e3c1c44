"""Where long-lived buffers come from: blocks of memory, handed out as views."""
