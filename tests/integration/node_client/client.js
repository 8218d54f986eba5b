// Calls to whichever replica answers, as docs/api.md tells.

const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const FILES = ["members", "worlds", "barriers", "checkpoints"].map((name) => `strata/v1/${name}.proto`);
const AGAIN = new Set([grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED, grpc.status.UNKNOWN]);

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

class Client {
  constructor(endpoints, protos) {
    const definition = loader.loadSync(FILES, { includeDirs: [protos], longs: Number, enums: String, defaults: true });
    this.v1 = grpc.loadPackageDefinition(definition).strata.v1;
    const options = { "grpc.enable_retries": 0, "grpc.initial_reconnect_backoff_ms": 100 };
    this.replicas = endpoints.map((address) => new grpc.Client(address, grpc.credentials.createInsecure(), options));
    this.turn = 0;
    this.token = undefined;
  }

  // Returns the response; an error of Strata's has `strata`, the packed details.
  async call(service, method, request, { seconds = 2, tries = 100, turn } = {}) {
    for (;;) {
      try {
        const response = await this.once(service, method, { ...request, token: this.token }, seconds, turn);
        if (!this.token || response.token.revision > this.token.revision) this.token = response.token;
        return response;
      } catch (error) {
        const [packed] = error.metadata?.get("strata-error-bin") ?? [];
        if (packed) error.strata = this.v1.Error.deserialize(packed);
        if (!AGAIN.has(error.code) || --tries <= 0) throw error;
        if (turn === undefined) this.turn += 1;
        else turn += 1;
        await pause(100);
      }
    }
  }

  once(service, method, request, seconds, turn = this.turn) {
    const { path, requestSerialize, responseDeserialize } = this.v1[service].service[method];
    const replica = this.replicas[turn % this.replicas.length];
    const deadline = { deadline: Date.now() + 1000 * seconds };
    return new Promise((resolve, reject) =>
      replica.makeUnaryRequest(path, requestSerialize, responseDeserialize, request, new grpc.Metadata(), deadline,
        (error, response) => (error ? reject(error) : resolve(response))));
  }

  close() {
    this.replicas.forEach((replica) => replica.close());
  }
}

module.exports = { Client, grpc, pause };
