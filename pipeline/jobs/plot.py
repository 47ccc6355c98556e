"""One sample's maps as a picture: heat maps with the tokens along both sides."""

from pathlib import Path

from pipeline.readers import OlaDataset
from storage_schema.arrays import name_array
from storage_schema.errors import InvalidRecipeError

_INCHES_A_TOKEN = 0.2


def plot_sample(dataset: OlaDataset, index: int, output: Path) -> None:
    """Draws the maps of a sample side by side, on a square-root color scale, and writes a PNG or SVG file.

    Tokens without characters (special tokens) are labeled `[ ]`.

    Raises:
        InvalidRecipeError: the dataset has no such sample, or the file is neither .png nor .svg.
    """
    if output.suffix not in (".png", ".svg"):
        raise InvalidRecipeError(f"cannot draw to {output}: name a .png or .svg file")
    if not 0 <= index < len(dataset):
        raise InvalidRecipeError(f"{dataset.ref} has samples 0 to {len(dataset) - 1}, asked for {index}")
    import matplotlib
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    item = dataset[index]
    text = item.sample.text
    # Control characters have no glyph, and some may not stand in XML.
    text = "".join(char if char.isprintable() else " " for char in text)
    labels = [text[start:stop].strip() or "[ ]" for start, stop in item.offsets.tolist()]
    side = max(2.5, _INCHES_A_TOKEN * len(labels))
    figure = Figure(figsize=((side + 0.3) * len(dataset.maps) + 1, side + 2.2), layout="constrained")
    axes = figure.subplots(1, len(dataset.maps), squeeze=False)[0]
    for axis, name, values in zip(axes, dataset.maps, item.maps, strict=True):
        axis.imshow(values.numpy(), cmap="magma", norm=PowerNorm(0.5, vmin=0), interpolation="nearest")
        axis.set_title(name_array(name).replace("_", " "))
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8, parse_math=False)
        axis.set_yticks(range(len(labels)), labels if axis is axes[0] else [], fontsize=8, parse_math=False)
        axis.set_xlabel("key")
    axes[0].set_ylabel("query")
    figure.suptitle(f"{dataset.ref}, sample {index}", parse_math=False)
    # The salt makes the ids in an SVG, and so its bytes, the same each time.
    with matplotlib.rc_context({"svg.hashsalt": "ola"}):
        figure.savefig(output, dpi=120, metadata={"Date": None} if output.suffix == ".svg" else {})
