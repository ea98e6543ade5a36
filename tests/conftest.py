"""What every suite shares: nothing that is drawn is drawn anew each day."""

from hypothesis import settings

settings.register_profile("of_the_tree", derandomize=True)
settings.load_profile("of_the_tree")
