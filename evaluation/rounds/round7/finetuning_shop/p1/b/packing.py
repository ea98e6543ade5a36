"""First-fit packing of short conversations into fixed-length rows."""
import torch

EOS = 2
PAD = 0


def pack(docs, seq_len):
    rows = []
    open_rows = []
    for ids in docs:
        piece = ids[: seq_len - 1] + [EOS]
        for row in open_rows:
            if len(row) + len(piece) <= seq_len:
                row.extend(piece)
                break
        else:
            row = list(piece)
            open_rows.append(row)
            rows.append(row)
        open_rows = [r for r in open_rows if len(r) < seq_len - 6]
    return rows


def rows_for_rank(docs, seq_len, rank, world):
    return pack(docs[rank::world], seq_len)


def to_tensor(rows, seq_len):
    out = torch.full((len(rows), seq_len), PAD, dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out
