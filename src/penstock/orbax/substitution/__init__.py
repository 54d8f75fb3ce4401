"""Orbax and penstock in one program: penstock's names in Orbax's place, and Orbax's classes in ours."""
