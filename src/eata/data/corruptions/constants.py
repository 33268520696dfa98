"""The numbers of ImageNet-C and CIFAR-10-C: for each corruption, its constants at severities 1 to 5.

They are those of Hendrycks & Dietterich (2019). One departs for large images: ``elastic_transform`` there follows
``imagecorruptions``, which bends the image at every severity; the published set shears it at the first two instead.
"""

from __future__ import annotations

from typing import Any

_Table = dict[str, tuple[Any, Any, Any, Any, Any]]

IMAGENET: _Table = {
    # standard deviation of the noise; white is 1
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),
    # photons that make white
    "shot_noise": (60, 25, 12, 5, 3),
    # share of the values that become black or white
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),
    # radius of the disc, sigma that softens its rim; pixels
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    # sigma of the blur before and after (pixels), reach of the shuffle (pixels), rounds of it
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    # radius, sigma; pixels
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    # number of zooms from 1 upwards, and the step between them (np.arange of the original rounds some ends up)
    "zoom_blur": ((12, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03)),
    # mean and deviation of the flakes, their zoom, threshold, radius and sigma of their fall, weight of the photograph
    "snow": (
        (0.1, 0.3, 3.0, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2.0, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4.0, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    # weight of the photograph, weight of the ice, scale of the ice
    "frost": ((1.0, 0.4, 1.0), (0.8, 0.6, 1.0), (0.7, 0.7, 1.0), (0.65, 0.7, 1.0), (0.6, 0.75, 1.0)),
    # thickness, decay of the roughness from one scale to the next finer
    "fog": ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)),
    # what is added to the value of HSV; white is 1
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    # factor of the distance to the mean
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    # amplitude and sigma of the bending, reach of the affine shift; all as fractions of the side
    "elastic_transform": ((0.0625, 0.01, 0), (0.08125, 0.01, 0), (0.10625, 0.01, 0), (0.125, 0.01, 0), (0.15, 0.01, 0)),
    # size of the small image over that of the large one
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
    # JPEG quality
    "jpeg_compression": (25, 18, 15, 10, 7),
}

CIFAR: _Table = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
    "snow": (
        (0.1, 0.2, 1.0, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1.0, 0.2, 0.2), (1.0, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
    "fog": ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": (80, 65, 58, 50, 40),
}
