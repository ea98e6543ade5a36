import numpy as np

MIN_SCALE = 0.5


def random_flip(image, boxes, rng):
    if rng.random() < 0.5:
        size = image.shape[-1]
        image = image[..., ::-1]
        boxes = boxes.copy()
        boxes[:, [0, 2]] = size - boxes[:, [2, 0]]
    return image, boxes


def resize_nearest(image, size):
    idx = (np.arange(size) * image.shape[-1] / size).astype(int)
    return image[:, idx][:, :, idx]


def random_sized_crop(image, boxes, rng):
    """Square crops; a crop is kept when the centre of some object lies in it."""
    size = image.shape[-1]
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    while True:
        side = int(rng.uniform(MIN_SCALE, 1.0) * size)
        x0, y0 = rng.integers(0, size - side + 1, 2)
        lo, hi = np.array([x0, y0]), np.array([x0 + side, y0 + side])
        inside = ((centres > lo) & (centres < hi)).all(1)
        if inside.any():
            break
    crop = image[:, y0:y0 + side, x0:x0 + side]
    kept = boxes[inside] - np.tile(lo, 2)
    kept = np.clip(kept, 0, side) * (size / side)
    return resize_nearest(crop, size), kept.astype(np.float32)
