"""Work on top of any store: workspaces, holds on directories, deletion and paths."""
