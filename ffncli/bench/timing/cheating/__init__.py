"""What tells a kernel that cheats: what it replaced in this process, and calls that show how it answers."""
