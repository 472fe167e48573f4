// The numbers of the page "Explore", without its pictures. tests/test_explore.py compares
// them with kernels.lab.occupancy and kernels.lab.record.
"use strict";

const roundUp = (value, multiple) => Math.ceil(value / multiple) * multiple;

// How many blocks of a kernel live on one SM: kernels.lab.occupancy.resident in JavaScript.
// gpu has the fields of kernels.lab.gpu.Gpu, and sm_partitions. `each` is what one block
// takes, `budgets` what the SM has, `limits` how many blocks each budget is enough for.
function residency(gpu, warps, registers, shared) {
  for (const [value, least] of [[warps, 1], [registers, 0], [shared, 0]])
    if (!Number.isInteger(value) || value < least)
      throw new RangeError(`expected a whole number from ${least} on, got ${value}`);

  const threads = warps * gpu.warp_size;
  const perWarp = roundUp(registers * gpu.warp_size, gpu.register_granularity);
  const checked = perWarp * roundUp(warps, gpu.sm_partitions);
  const reserved = gpu.shared_reserved_per_block;
  const perBlock = roundUp(shared + reserved, gpu.shared_granularity);

  function byRegisters() {
    if (registers === 0) return Infinity;
    if (registers > gpu.max_registers_per_thread) return 0;
    if (checked > gpu.registers_per_block) return 0;
    const quarter = Math.floor(gpu.registers_per_sm / gpu.sm_partitions);
    const warpsOfQuarter = Math.floor(quarter / perWarp);
    return Math.floor((warpsOfQuarter * gpu.sm_partitions) / warps);
  }

  function byShared() {
    if (perBlock === 0) return Infinity;
    if (perBlock > gpu.shared_per_block + reserved) return 0;
    return Math.floor(gpu.shared_per_sm / perBlock);
  }

  const warpsOfSm = Math.floor(gpu.threads_per_sm / gpu.warp_size);
  const limits = {
    threads: threads > gpu.threads_per_block ? 0 : Math.floor(warpsOfSm / warps),
    blocks: gpu.blocks_per_sm,
    registers: byRegisters(),
    "shared memory": byShared(),
  };
  const blocks = Math.min(...Object.values(limits));
  return {
    blocks,
    warps: blocks * warps,
    share: (blocks * threads) / gpu.threads_per_sm,
    limits,
    limit: Object.keys(limits).find((name) => limits[name] === blocks),
    each: {
      threads,
      blocks: 1,
      registers: perWarp * warps,
      "shared memory": perBlock,
    },
    budgets: {
      threads: gpu.threads_per_sm,
      blocks: gpu.blocks_per_sm,
      registers: gpu.registers_per_sm,
      "shared memory": gpu.shared_per_sm,
    },
  };
}

const ITEM_SIZE = { float64: 8, float32: 4, float16: 2, bfloat16: 2 };

// The rows of a recorded file (objects of text) that have a time of the GPU, with numbers:
// n_rows, n_cols, bytes (of the matrix), the times in µs, and share, the time of the
// yardstick (a provider) over the row's. Where the yardstick is not the copy, the copy's
// rows are left out: it moves fewer bytes.
function measurements(rows, yardstick) {
  const numbers = rows
    .filter((row) => row.clock !== "host" && !Number.isNaN(Number(row.p50_us)))
    .filter((row) => row.provider !== "copy" || yardstick === "copy")
    .map((row) => {
      const made = { ...row };
      for (const name of ["n_rows", "n_cols", "p20_us", "p50_us", "p80_us"])
        made[name] = Number(row[name]);
      made.bytes = made.n_rows * made.n_cols * ITEM_SIZE[row.dtype];
      return made;
    });
  const key = (row) => [row.dtype, row.n_rows, row.n_cols, row.clock].join(" ");
  const stick = new Map();
  for (const row of numbers)
    if (row.provider === yardstick) stick.set(key(row), row.p50_us);
  for (const row of numbers) row.share = (stick.get(key(row)) ?? NaN) / row.p50_us;
  return numbers;
}

const SAME_SIZE = 1.02; // sizes within 2 % are one size: whole rows make them differ
const FEW_ROWS = 128;
const LEAST_LENGTHS = 6; // of rows, to be no group by chance; 3 where rows are few

// Which matrices make one figure: those of one size in bytes, or of equally many rows.
// Returns [{by: "bytes" or "rows", value, matches(row)}], the largest size first.
function groupings(rows) {
  const bySize = [];
  for (const bytes of [...new Set(rows.map((row) => row.bytes))].sort((a, b) => a - b))
    if (!bySize.length || bytes > bySize.at(-1) * SAME_SIZE) bySize.push(bytes);
  const heights = new Set(rows.map((row) => row.n_rows));
  const found = [
    ...bySize.reverse().map((value) => ({
      by: "bytes",
      value,
      matches: (row) => row.bytes >= value && row.bytes <= value * SAME_SIZE,
    })),
    ...[...heights].sort((a, b) => a - b).map((value) => ({
      by: "rows",
      value,
      matches: (row) => row.n_rows === value,
    })),
  ];
  return found.filter(({ by, value, matches }) => {
    const lengths = new Set(rows.filter(matches).map((row) => row.n_cols));
    return lengths.size >= (by === "rows" && value <= FEW_ROWS ? 3 : LEAST_LENGTHS);
  });
}
