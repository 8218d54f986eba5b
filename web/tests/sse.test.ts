import { describe, expect, it } from "vitest";
import { SseParser } from "../src/live/sse";

const STREAM = ": begin\n\nevent: change\nid: 7\ndata: {\"a\":1}\n\n: here\n\nevent: change\nid: 8\ndata: {\"a\":\ndata: 2}\n\n";
const EVENTS = [
  { event: "change", id: "7", data: '{"a":1}' },
  { event: "change", id: "8", data: '{"a":\n2}' },
];

describe("the parser of server-sent events", () => {
  it("finds the same events wherever the stream is cut", () => {
    for (let cut = 0; cut <= STREAM.length; cut++) {
      const parser = new SseParser();
      expect([...parser.push(STREAM.slice(0, cut)), ...parser.push(STREAM.slice(cut))]).toEqual(EVENTS);
    }
  });

  it("takes all three line ends, also when the two characters of one arrive apart", () => {
    for (const end of ["\n", "\r\n", "\r"]) {
      const text = STREAM.replaceAll("\n", end);
      const parser = new SseParser();
      expect([...text].flatMap((character) => parser.push(character))).toEqual(EVENTS);
      expect(new SseParser().push(text)).toEqual(EVENTS);
    }
  });

  it("keeps the last id for events that have none, and drops an event that is not complete", () => {
    const parser = new SseParser();
    parser.push("id: 3\ndata: x\n\n");
    expect(parser.push("data: y\n\n")).toEqual([{ event: "message", id: "3", data: "y" }]);
    expect(parser.push("data: never ended\n")).toEqual([]);
  });

  it("says nothing for comments and for an event without data", () => {
    expect(new SseParser().push(": here\n\nevent: change\n\n")).toEqual([]);
  });
});
