// A member without Python: node member.js ENDPOINTS JOB WORKER ROOT PROTOS
//
// Three of them meet twice and commit a checkpoint; the last rank is then killed by the test. The
// others see their round break, find their place in the next world, meet there and leave. What
// happens is told as lines of JSON.

const crypto = require("node:crypto");
const { fileURLToPath, pathToFileURL } = require("node:url");
const { Client, grpc, pause } = require("./client.js");
const { claim, compose, mark, writePart } = require("./checkpoint.js");

const [endpoints, job, workerId, root, protos] = process.argv.slice(2);
const client = new Client(endpoints.split(","), protos);
const say = (event, facts = {}) => console.log(JSON.stringify({ event, worker: workerId, ...facts }));

async function refused(what, call) {
  try {
    await call;
    say("error", { what, status: "OK" });
  } catch (error) {
    const { code, hint, missing } = error.strata ?? {};
    say("error", { what, status: grpc.status[error.code], code, hint, missing, said: error.details });
  }
}

class Member {
  constructor(answer, registration) {
    this.incarnation = answer.incarnation;
    this.boot = registration.boot;
    this.state = { world: answer.world };
    this.beats = 0;
    this.timer = setInterval(() => this.beat(), 1000 * answer.heartbeatS);
  }

  // Each heartbeat goes to another replica, whoever serves this member.
  async beat() {
    const request = { job, workerId, boot: this.boot, incarnation: this.incarnation };
    try {
      this.state = await client.call("Members", "Heartbeat", request, { turn: this.beats++ });
    } catch (error) {
      say("heartbeat_failed", { status: grpc.status[error.code], said: error.details });
      process.exit(1);
    }
  }

  // Returns once there is a world of so many ranks, younger than `generation`, with a place for us.
  async world(size, generation = 0) {
    for (;;) {
      const { world, place } = this.state;
      if (place && world.size === size && world.generation > generation) break;
      await pause(20);
    }
    this.generation = this.state.world.generation;
    this.rank = this.state.place.firstRank;
    const { restore } = this.state.world;
    say("world", { generation: this.generation, rank: this.rank, size, restore: restore && restore.step });
  }

  async meet(round, facts = {}) {
    const payloads = [Buffer.from(`${workerId} in round ${round}`)];
    const arrival = { job, name: "meet", generation: this.generation, round, ranks: [this.rank], payloads, ...facts };
    const request = { arrival, workerId, incarnation: this.incarnation };
    const { outcome } = await client.call("Barriers", "WaitBarrier", request, { seconds: 35 });
    const brought = Object.entries(outcome.payloads).map(([rank, payload]) => [rank, payload.toString()]);
    say("met", { round, rank: this.rank, payloads: Object.fromEntries(brought) });
  }

  async save(step, weights) {
    claim(root, job, client.token.uid);
    const author = { workerId, incarnation: this.incarnation, generation: this.generation, rank: this.rank };
    const about = { job, author, step };
    let { checkpoint } = await client.call("Checkpoints", "BeginCheckpoint", {
      ...about, type: "CHECKPOINT_TYPE_FULL", root: pathToFileURL(root).href, attempt: crypto.randomUUID(),
      metadata: { writer: "node" },
    });
    const { attempt } = checkpoint;
    const folder = fileURLToPath(checkpoint.path);
    const part = await writePart(folder, checkpoint, this.rank, weights);
    await client.call("Checkpoints", "AckCheckpoint", { ...about, attempt, ...part });
    const look = async (until) => {
      do ({ checkpoint } = await client.call("Checkpoints", "GetCheckpoint", { job, step, attempt }));
      while (!until(checkpoint) && (await pause(20), true));
    };
    if (this.rank === 0) {
      await look((record) => record.acked.length === record.ranks);
      const seal = await compose(folder, checkpoint, null);
      await client.call("Checkpoints", "SealCheckpoint", { ...about, attempt, ...seal });
    }
    await look((record) => record.state !== "CHECKPOINT_STATE_OPEN");
    await mark(folder, checkpoint);
    say("saved", { state: checkpoint.state, step, rank: this.rank, latest: checkpoint.latest });
  }
}

async function main() {
  await refused("unknown job", client.call("Worlds", "GetWorld", { job: "nobody" }));
  const spec = { minWorkers: 1, maxWorkers: 3, settleS: 3 };
  const registration = { job, workerId, boot: crypto.randomUUID(), slots: 1, host: "node", pid: process.pid, spec };
  const member = new Member(await client.call("Members", "Register", { registration }, { seconds: 30 }), registration);
  await member.world(3);
  await member.meet(1);
  await member.meet(2);
  const stranger = (member.rank + 1) % 3;
  await refused("another's rank", member.meet(3, { ranks: [stranger] }));
  await member.save(10, Float32Array.from({ length: 1000 }, (_, index) => index + member.rank));
  if (member.rank === 2) {
    say("idle", { pid: process.pid });
    return; // until the test kills it
  }
  await refused("a death", member.meet(3));
  const before = member.generation;
  await member.world(2, before);
  await refused("an old generation", member.meet(4, { generation: before }));
  await member.meet(1);
  clearInterval(member.timer);
  await client.call("Members", "Leave", { job, workerId, incarnation: member.incarnation });
  client.close();
  say("left", { beats: member.beats });
}

main();
