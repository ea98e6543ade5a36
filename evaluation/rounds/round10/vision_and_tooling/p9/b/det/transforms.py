"""Augmentations that know about boxes.  A box is (y0, x0, y1, x1) in pixels."""
import numpy as np


class Compose:
    def __init__(self, *parts):
        self.parts = parts

    def __call__(self, img, boxes, rng):
        for p in self.parts:
            img, boxes = p(img, boxes, rng)
        return img, boxes


class RandomFlip:
    def __call__(self, img, boxes, rng):
        if rng.random() < 0.5:
            w = img.shape[1]
            img = img[:, ::-1]
            boxes = boxes.copy()
            boxes[:, [1, 3]] = w - boxes[:, [3, 1]]
        return img, boxes


def visible_share(boxes, window):
    y0, x0, y1, x1 = window
    h = np.clip(np.minimum(boxes[:, 2], y1) - np.maximum(boxes[:, 0], y0), 0, None)
    w = np.clip(np.minimum(boxes[:, 3], x1) - np.maximum(boxes[:, 1], x0), 0, None)
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return h * w / area


class BoxAwareCrop:
    """Square crop in which at least one box can still be seen."""

    def __init__(self, size, min_visible):
        self.size = size
        self.min_visible = min_visible

    def _window(self, img, rng):
        y = int(rng.integers(0, img.shape[0] - self.size + 1))
        x = int(rng.integers(0, img.shape[1] - self.size + 1))
        return y, x, y + self.size, x + self.size

    def __call__(self, img, boxes, rng):
        win = self._window(img, rng)
        while visible_share(boxes, win).max() < self.min_visible:
            win = self._window(img, rng)
        return self._apply(img, boxes, win)

    def _apply(self, img, boxes, win):
        y0, x0, y1, x1 = win
        keep = visible_share(boxes, win) > 0.3
        moved = boxes[keep] - np.array([y0, x0, y0, x0], np.float32)
        return img[y0:y1, x0:x1], np.clip(moved, 0, self.size)


class Normalize:
    def __call__(self, img, boxes, rng):
        return (img - img.mean()) / (img.std() + 1e-3), boxes
