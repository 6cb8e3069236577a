"""What the runtime is compared with. Each system runs in processes of its own, which wait without using the
processor until they are told to measure."""
